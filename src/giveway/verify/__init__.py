"""The promise, checked on the user's machine: whoever gives way gets the answer of an undisturbed run, to the bit."""
