"""Everything that replaces or steers a function of MindSpore: how an operator arrives. See ``doors.py``."""
