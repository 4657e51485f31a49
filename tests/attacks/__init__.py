"""Attacks on the library by files and by strangers on the network, each with a limit of time and memory."""
