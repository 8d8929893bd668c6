"""Start-up hook of the `deepspeed` alias: ``hf_zero.pth`` imports this file in every Python process.

It must cost next to nothing there, so it imports only ``sys`` (no ``__future__`` even) and puts one finder on
``sys.meta_path``. Everything else happens in :mod:`hf_zero.compat.finder`, on the first question about `deepspeed`.
"""

import sys


class DeepSpeedAliasFinder:
    """Answers for the module `deepspeed` and for the distribution `deepspeed`; says nothing about any other name.

    It stands first on ``sys.meta_path`` because a bare folder named ``deepspeed`` (of JSON files, say) in the working
    directory is a namespace package to the path finder and would hide us. A real DeepSpeed still wins, see
    :func:`hf_zero.compat.finder.alias_is_active`.
    """

    @staticmethod
    def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]  # naming the types would import them
        """The spec of `deepspeed` or of one of its submodules, else None."""
        if fullname != "deepspeed" and not fullname.startswith("deepspeed."):
            return None
        from hf_zero.compat.finder import find_spec

        return find_spec(fullname)

    @staticmethod
    def find_distributions(context=None):  # type: ignore[no-untyped-def]
        """The distribution `deepspeed` when it is asked for by name.

        Listings (no name) leave it out: pip must not take DeepSpeed for installed.
        """
        name = getattr(context, "name", None)
        if name is None or name.lower() != "deepspeed":
            return iter(())
        from hf_zero.compat.finder import find_distributions

        return find_distributions()


if DeepSpeedAliasFinder not in sys.meta_path:
    sys.meta_path.insert(0, DeepSpeedAliasFinder)  # type: ignore[arg-type]
