"""What ran when on each rank: ``recording.py`` records and measures it, ``picture.py`` writes a picture and a trace."""
