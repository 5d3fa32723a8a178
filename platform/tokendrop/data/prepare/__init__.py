"""From a corpus to token shards, streamed by Ray Data."""
