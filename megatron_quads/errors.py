"""The one exception users see: one line that says what, where and what to do. The CLI prints it and exits 2."""


class QuadsError(Exception):
    """A fault in the input or the set-up. ``what`` happened, ``where``, and what to ``do`` about it."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        parts = [what if not where else f"{what} [{where}]", do]
        super().__init__(" ".join("; ".join(p for p in parts if p).split()))


class MismatchError(QuadsError):
    """A proof failed (weights differ): exit code 1, not 2, so scripts can tell a failed proof from bad input."""

    exit_code = 1
