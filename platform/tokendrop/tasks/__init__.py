"""What can be trained: a file for each task. `tokendrop.train.task.Task` says what a task has."""
