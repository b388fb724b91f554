"""The way of several strides: what they gained in all, since each alone may lose less than anybody can see. Pure."""

import math
from typing import Annotated

from pydantic import Field
from rooftune.tuner.control.outcome import Knobs
from rooftune.tuner.record import Count, Part


class Way(Part):
    """Pushes that were kept though none was shown better than where they began.

    start: that setting, and the cycle that pushed it (None: the engine's boot setting). gain, half_width: attainment
    won in all, and half of its interval: the pushes' own, taken as independent of each other.
    """

    start: Knobs
    start_cycle: Count | None = None
    gain: float = 0.0
    half_width: Annotated[float, Field(ge=0)] = 0.0

    def onward(self, gain: float, half_width: float) -> "Way":
        """After one more push."""
        return self.model_copy(update={"gain": self.gain + gain, "half_width": math.hypot(self.half_width, half_width)})

    @property
    def lost(self) -> bool:
        """Whether it was shown to be worse here than where the way began."""
        return self.gain + self.half_width < 0.0

    @property
    def won(self) -> bool:
        """Whether it was shown to be better here, so that another way begins."""
        return self.gain - self.half_width > 0.0
