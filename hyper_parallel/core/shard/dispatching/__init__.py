"""From an operator that meets a DTensor to what each rank calls and sends."""
