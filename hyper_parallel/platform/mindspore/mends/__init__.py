"""What MindSpore 2.10 gets wrong on a CPU, and nothing else: a file for each fault.

Each says what is wrong, with the smallest program that shows it. ``ACTIVE`` is the one switch for all of them. Where a
later MindSpore is right, a file goes together with the lines that call it.
"""

from hyper_parallel.platform.mindspore.base.start import on_ascend

ACTIVE = not on_ascend()
