"""A run made again from its folder, bit for bit."""
