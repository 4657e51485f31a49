"""The command line `hyper-parallel`: one file per command, none of which imports a framework."""
