"""The window of unfinished messages of a queue, and the memory that windows share."""
