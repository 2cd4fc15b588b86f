"""What ran when on each rank: ``recording.py`` records and measures it, ``picture.py`` draws it, and ``trace_file.py``
writes a trace for Perfetto."""
