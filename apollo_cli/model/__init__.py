"""The network: vision encoders, connector, language model, prompt and generation."""
