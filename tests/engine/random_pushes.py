"""Random pushes for tests of a tuning desk."""

import random

from rooftune.policies import wire


def random_push(chance: random.Random, revision: int) -> wire.PushRequest:
    """A budget of up to 512 tokens, for seconds."""
    return wire.PushRequest(
        lease_s=chance.choice([1.0, 5.0, 20.0]),
        expected_revision=revision,
        actor="a",
        reason="r",
        knobs=wire.Knobs(step_tokens=chance.randint(1, 512)),
    )
