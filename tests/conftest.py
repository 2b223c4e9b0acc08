"""What holds for all tests."""

from hypothesis import settings

# No deadline: a test must not depend on how busy the machine is. Derandomized: the same examples on every machine.
settings.register_profile("fvc", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fvc")
