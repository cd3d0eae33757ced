"""Judge trained models. One subcommand a question:

    python eval.py zorro RUN[,RUN...] --sentences=DIR       grammar in the style of child-directed speech
    python eval.py blimp RUN[,RUN...] --sentences=DIR       grammar, BLiMP's JSON lines

RUN is a run folder of a trainer (config.json, model.safetensors). `python eval.py SUBCOMMAND --help` lists the flags.
"""

import importlib
import sys

from flags import UserError, fail, tyro_cli

# Name -> (module, its dataclass of flags). A module must not import torch at its top; its main(flags) does the work.
SUBCOMMANDS = {"zorro": ("grammar", "Zorro"), "blimp": ("grammar", "Blimp")}


def main(argv):
    """Run the subcommand that argv names. Raises UserError."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name not in SUBCOMMANDS:
        raise UserError(f"eval.py {name}: unknown subcommand; choose one of {', '.join(SUBCOMMANDS)}")
    module, flags_class = SUBCOMMANDS[name]
    module = importlib.import_module(module)
    Flags = getattr(module, flags_class)
    flags = tyro_cli(Flags, argv[1:], Flags())
    flags.check()
    module.main(flags)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        fail(error)
