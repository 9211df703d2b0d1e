"""Text that users write and read: checks of what comes in, values as messages show them, units, files, progress and log levels.

Open `shown_value.py` first. No module here imports torch or other folders of the package.
"""
