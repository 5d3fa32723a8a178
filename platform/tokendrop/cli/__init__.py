"""The command `tokendrop`: one file for each command or group of commands."""
