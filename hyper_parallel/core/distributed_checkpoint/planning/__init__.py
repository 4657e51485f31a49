"""Who writes and reads what: arithmetic on layouts."""
