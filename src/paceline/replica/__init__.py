"""One member's copy of the model: flat memory, random state, its device, and how a step is left."""
