"""Files and batches as OpenAI's API has them: kept below a data directory, run with whatever the engine has left."""
