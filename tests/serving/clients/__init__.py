"""Programs that people use with OpenAI's API, against a real server."""
