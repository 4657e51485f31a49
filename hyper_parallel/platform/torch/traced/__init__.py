"""Functions of this library that compiled code looks into; all others it calls as they are (``compiling.py``)."""
