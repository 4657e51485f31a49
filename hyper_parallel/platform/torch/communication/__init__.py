"""Groups, collectives and messages, plain and with gradients."""
