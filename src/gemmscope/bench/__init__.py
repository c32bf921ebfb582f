"""How long it really takes: tasks go to a worker process, samples come back one by one, statistics say how sure they are."""
