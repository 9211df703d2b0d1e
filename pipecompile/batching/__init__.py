"""What a model takes: flat leaves, their batch dimensions, and objects taken apart."""
