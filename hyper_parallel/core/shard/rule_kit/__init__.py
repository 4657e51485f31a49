"""What rules are written with: signatures, the table they are found in, and shared parts."""
