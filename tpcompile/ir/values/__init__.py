"""Values as expressions: what one element of a value is, over checkpoint tensors and inputs."""
