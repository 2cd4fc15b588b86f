"""Callbacks: they stop a run at a signal, resume it exactly, notice NaN and copies that differ, and report its speed
and memory.

``defaults.py`` adds some of them to every run, and refuses callbacks of Lightning's that can't work. Nothing else here
is needed to train.
"""
