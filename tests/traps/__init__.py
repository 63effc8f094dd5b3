"""The mistakes of TRAPS.md, put back one by one; the numbers of the tests are its numbers.

Each test first shows that the correct graph passes. It then puts the mistake back and shows that
the checker refuses it, or that the numbers differ from Hugging Face's. Traps of schedules and of
running processes are tested with the program and the runtime.
"""
