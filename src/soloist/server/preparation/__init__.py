"""From a request's body to a checked prompt, in a process that may be killed.

Reading a request is work that its sender decides about: JSON, checks, a chat template that may
loop, a tokenizer that holds Python's lock, a grammar. None runs where tokens are made or sent.
`pool` hands bodies to children of `fork_server`; a child runs one of `jobs` and returns what the
engine needs. A child that takes too much time or memory is ended, and its request is refused.

Knows neither the engine nor HTTP, and loads no torch.
"""
