"""The whole way in one command: fetch a model, convert it, train it a little, score it, look inside it."""
