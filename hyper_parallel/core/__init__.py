"""The library proper: layouts, operators and parallelisms. Nothing here imports a framework."""
