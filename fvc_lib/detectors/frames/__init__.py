"""Published and own networks that turn single frames or pictures into features."""
