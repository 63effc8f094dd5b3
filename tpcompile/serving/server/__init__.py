"""An HTTP server with the API that OpenAI's clients speak."""
