"""Judge trained models. One subcommand a question:

    python eval.py perplexity RUN[,RUN...] --data=text.txt        loss, perplexity, bits a byte, with intervals and differences
    python eval.py tasks RUN[,RUN...] --tasks=arc_easy,boolq      zero-shot multiple choice through EleutherAI's lm-eval
    python eval.py lm-eval RUN --tasks lambada_openai --limit 50  lm-eval's own command line, with our model behind it
    python eval.py sample RUN --prompt="The "                     text
    python eval.py zorro RUN[,RUN...] --sentences=DIR             grammar in the style of child-directed speech
    python eval.py blimp RUN[,RUN...] --sentences=DIR             grammar, BLiMP's JSON lines

RUN is a run folder of a trainer (config.json, model.safetensors). `python eval.py SUBCOMMAND --help` lists the flags.
"""

import importlib
import sys

from flags import UserError, fail, tyro_cli
from trained import RunFlags

# Name -> (module, its dataclass of flags). A module must not import torch at its top, so that a wrong flag is answered at once;
# its main(flags) does the work.
SUBCOMMANDS = {
    "perplexity": ("perplexity", "Perplexity"),
    "tasks": ("zeroshot", "Tasks"),
    "sample": ("sample", "Sample"),
    "zorro": ("grammar", "Zorro"),
    "blimp": ("grammar", "Blimp"),
}


def main(argv):
    """Run the subcommand that argv names. Raises UserError."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name == "lm-eval":
        lm_eval(argv[1:])
        return
    if name not in SUBCOMMANDS:
        problem = f"{name}: unknown subcommand" if name else "SUBCOMMAND: missing"
        raise UserError(f"{problem}; choose one of {', '.join([*SUBCOMMANDS, 'lm-eval'])}")
    module_name, flags_name = SUBCOMMANDS[name]
    module = importlib.import_module(module_name)
    Flags = getattr(module, flags_name)
    flags = tyro_cli(Flags, argv[1:], Flags())
    flags.check()
    module.main(flags)


def lm_eval(argv):
    """lm-eval's own command line after RUN, which becomes its --model and --model_args: lm-eval has no other way of learning
    about a model than being told before it starts."""
    run = argv[0] if argv else ""
    if not run.startswith("-"):
        RunFlags(runs=run).check()
    import lmeval
    lmeval.command_line(run, argv[1:])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", code=130)
