"""How ranks agree on a save or a load: over a process group, or through files."""
