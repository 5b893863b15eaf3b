"""The study: families of Lipschitz networks compared on data sets, with the paper it comes from."""

from importlib.util import find_spec

from ldlt.errors import MissingExtraError

__all__ = ["require_extra"]

_PACKAGES = ("pandas", "pyarrow", "scipy", "scikit_posthocs", "joblib", "filelock", "rich", "jinja2", "matplotlib")


def require_extra() -> None:
    """Refuse a study at its beginning, not after its hours, if a package of the extra ``bench`` is missing.

    Raises:
        MissingExtraError: Naming the package.
    """
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "bench")
