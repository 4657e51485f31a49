"""What ranks do, told to observers and compared with what the others do."""
