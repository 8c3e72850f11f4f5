"""How a recipe's ``fp8`` section stores AdamW's FP8 moments."""


def moment_codec(released_constants: bool, second_moment: str, no_moments: str = "") -> str:
    """The codec that the section asks for: a name in ``coat_kernels.CODECS``.

    Args:
        released_constants: ``fp8.released_constants``.
        second_moment: ``fp8.second_moment``, ``nearest`` or ``chance``.
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
    return "released" if released_constants else "dre_e4m3_chance" if by_chance else "dre_e4m3"
