"""How a recipe's ``fp8`` section stores AdamW's FP8 moments."""

ROUNDINGS = {"nearest": "dre_e4m3", "chance": "dre_e4m3_chance"}
"""What ``fp8.second_moment`` may be but for ``auto`` -> its codec in ``coat_kernels.CODECS``."""

NEAREST_UP_TO = 0.99
"""The largest beta2 with which ``auto`` rounds to nearest. At 0.95 runs
with it end near BF16, at 0.999 they are behind (docs/results.md); between, none was compared."""


def check_moments(released_constants: bool, second_moment: str, no_moments: str = "") -> None:
    """Refuse settings without effect; ``auto`` never is one.

    Args:
        released_constants: ``fp8.released_constants``.
        second_moment: ``fp8.second_moment``: ``auto``, ``nearest`` or ``chance``.
        no_moments: what makes the optimizer torch's, which has no FP8 moments; empty if it is not.

    Raises:
        ValueError: a setting has no effect.
    """
    by_chance = second_moment == "chance"
    for name, is_given in (
        ("released_constants", released_constants),
        ("second_moment", by_chance),
    ):
        if is_given and no_moments:
            raise ValueError(
                f"fp8.{name} has no effect with {no_moments}; remove it, or set fp8.optimizer: coat"
            )
    if released_constants and by_chance:
        raise ValueError(
            "fp8.second_moment: chance has no effect with fp8.released_constants, whose kernel "
            "rounds to nearest; remove one of them"
        )


def moment_codec(released_constants: bool, second_moment: str, beta2: float) -> str:
    """The codec that the section asks for: a name in ``coat_kernels.CODECS``.

    A step moves the second moment v by up to 1 - beta2 of itself where gradients shrink: 0.1% at
    0.999. Codes of E4M3 are up to 12.5% apart, so rounding to nearest puts v back where it was, and
    it stays too large (kernels/README.md). By chance it is right on average, at the price of more
    variance, which costs where beta2 is small. So ``auto`` chooses by beta2.

    Args:
        released_constants: ``fp8.released_constants``, whose codec rounds to nearest.
        second_moment: ``fp8.second_moment``: ``auto``, ``nearest`` or ``chance``.
        beta2: the stage's second decay rate.
    """
    if released_constants:
        return "released"
    if second_moment == "auto":
        second_moment = "chance" if beta2 > NEAREST_UP_TO else "nearest"
    return ROUNDINGS[second_moment]


def rounding_of(states: str) -> str | None:
    """The ``fp8.second_moment`` that made optimizer states.

    Args:
        states: name of optimizer and codec, as checkpoints record it.

    Returns:
        ``nearest``, ``chance``, or None for states that this setting does not make.
    """
    words = states.split()
    return next((rounding for rounding, codec in ROUNDINGS.items() if codec in words), None)
