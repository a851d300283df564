"""``python -m keyedopt.tools.panel [NAME…]`` checks published libraries, each in an environment of its own.

Each library is installed at its pinned version into ``--environments``, in a folder that sees the
packages of this environment, such as torch and keyedopt. The results and a page of them go to ``--output``; a
table is printed.
The exit code is 1 if a library cannot be installed, or its gate is red: it fails a clause that its list in
``conformance/expectations/`` does not have, or holds one that the list has.

With ``--beyond`` these are libraries that nobody had checked while the suite was written. Only the musts
of the suite are judged; there is no gate, and the table names those that fail.
"""

import argparse
import re
import site
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Result, read
from keyedopt.conformance.results.verdict import FAILING, judge
from keyedopt.conformance.targets import beyond

TARGETS = "keyedopt.conformance.targets"
#: Runs a verb of keyedopt.
VERB = "from keyedopt.cli.main import app; app()"
#: What to install for each library; the adapters are in `keyedopt.conformance.targets.panel`.
_TRANSFORMERS = (
    *("transformers==4.46.3", "huggingface-hub==0.36.2", "regex==2026.11.15", "safetensors==0.8.0"),
    *("tokenizers==0.20.3", "tqdm==4.70.1"),
)
PINNED = {
    "apollo": ("apollo-torch==1.0.3", "bitsandbytes==0.50.2", *_TRANSFORMERS),
    "bitsandbytes": ("bitsandbytes==0.50.2",),
    "catalyst": ("catalyst==22.4",),
    "colossalai": ("colossalai==0.5.0",),
    "deepspeed": (
        *("deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "ninja==1.13.2"),
        *("psutil==7.2.2", "tqdm==4.70.1"),
    ),
    "dlrm": (
        "https://raw.githubusercontent.com/facebookresearch/dlrm/"
        "090956ee2319ddd349a42232958aefccfe3f7b0a/optim/rwsadagrad.py",
    ),
    "galore": ("galore-torch==1.0", "bitsandbytes==0.50.2", *_TRANSFORMERS),
    "heavyball": ("heavyball==3.2.1",),
    "lightly": ("lightly==1.6.0",),
    "optimi": ("torch-optimi==0.3.3",),
    "pytorch_lamb": ("pytorch-lamb==1.0.0", "tensorboardX==2.6.5"),
    "pytorch_optimizer": ("pytorch_optimizer==4.1.0",),
    "timm": ("timm==1.0.31",),
    "torchao": ("torchao==0.18.0",),
    "torch_optimizer": ("torch-optimizer==0.3.0", "pytorch-ranger==0.1.1"),
    "transformers": _TRANSFORMERS,
}
#: The same for libraries beyond the panel; the adapters are in `keyedopt.conformance.targets.beyond` and
#: `keyedopt.conformance.targets.beyond_later`.
BEYOND = {
    "adv_optm": ("adv-optm==2.5.16",),
    "flair": ("flair==0.15.1",),
    "mmpretrain": (
        *("mmpretrain==1.2.0", "mmengine==0.10.7", "addict==2.4.0", "yapf==0.43.0", "termcolor==3.3.0"),
        *("rich==15.0.0", "markdown-it-py==4.3.0", "mdurl==0.1.2"),
    ),
    "open_lars": ("open-lars==0.1.1",),
    "pylocron": ("pylocron==0.3.0",),
    "pyro": ("pyro-ppl==1.9.2",),
    "pytorch_pretrained_bert": ("pytorch-pretrained-bert==0.6.2",),
    "pytorch_pretrained_gpt": ("pytorch-pretrained-bert==0.6.2",),
    "pytorch_transformers": ("pytorch-transformers==1.2.0",),
    "torch_optim_sparse": ("torch-optim-sparse==0.1.3",),
    "torchastic": ("torchastic==0.1.2",),
    "torchium": ("torchium==0.1.5",),
    "torchium_sgdw": ("torchium==0.1.5",),
    "torchopt": ("torchopt==0.7.3", "optree==0.20.0", "graphviz==0.21"),
    "easycv": ("pai-easycv==0.11.7",),
    "espnet": ("espnet==202511", "typeguard==4.6.1"),
    "funasr": ("funasr==1.4.16",),
    "ipex": ("intel_extension_for_pytorch==2.8.0",),
    "labml": ("labml-nn==0.5.1", "labml==0.5.3"),
    "llama_cookbook": ("llama-cookbook==0.0.5.post1",),
    "qhoptim": ("qhoptim==1.1.0",),
    "simclr": ("simclr==1.0.2",),
    "tape": ("tape-proteins==0.5",),
    "torchbiggraph": ("torchbiggraph==1.0.0",),
    "agc_optims": ("agc-optims==0.0.2",),
    "composer": ("mosaicml==0.32.1",),
    "easynlp": ("pai-easynlp==0.0.3",),
    "fira": ("fira==1.0.2", *_TRANSFORMERS),
    "flashoptim": ("flashoptim==0.1.4",),
    "geoopt": ("geoopt==0.5.1", "scipy==1.17.1"),
    "jiant": ("jiant==2.2.0",),
    "ladam": ("ladam==0.4.1",),
    "modelscope": ("modelscope==1.40.2",),
    "parlai": ("parlai==1.7.2",),
    "pl_bolts": (
        *("lightning-bolts==0.7.0", "pytorch-lightning==2.6.6", "lightning-utilities==0.15.3"),
        *("torchmetrics==1.0.3",),
    ),
    "pywick": ("pywick==0.6.5",),
    "s3prl": ("s3prl==0.4.18",),
    "torchlab": ("torchlab-pytorch==0.1.1",),
    "bregman": ("bregman-learning==0.0.0",),
    "evie_optim": ("evie-optim==0.1.0",),
    "fracgrad": ("fracgrad==0.1.2",),
    "mmselfsup": (
        *("mmselfsup==1.0.0", "mmengine==0.10.7", "addict==2.4.0", "yapf==0.43.0", "termcolor==3.3.0"),
        *("rich==15.0.0", "markdown-it-py==4.3.0", "mdurl==0.1.2"),
    ),
    "psd_optimizer": ("psd-optimizer==0.1.2",),
    "pytext": ("pytext-nlp==0.3.3",),
    "rad": ("pytorch-rad==0.2.1",),
    "relativistic_adam": ("relativistic-adam==1.0.0",),
    "torch_sgld": ("torch-sgld==0.1.0",),
    "torchkbert": ("torchkbert==1.1.3",),
}
#: The heads of the tables.
HEAD = "| library | version | clauses held | known | new |"
HEAD_OF_MUSTS = "| library | version | musts held | failing |"
#: Packages of which only submodules are imported: their own imports need much more, such as torchvision.
BARE = {
    "catalyst": ("catalyst", "catalyst.contrib", "catalyst.contrib.optimizers"),
    "colossalai": ("colossalai", "colossalai.nn", "colossalai.nn.optimizer"),
    "composer": ("composer", "composer.optim", "composer.utils"),
    "easycv": ("easycv", "easycv.core", "easycv.core.optimizer", "easycv.framework"),
    "easynlp": ("easynlp", "easynlp.core"),
    "espnet": ("espnet2", "espnet2.optimizers"),
    "flair": ("flair",),
    "funasr": ("funasr", "funasr.optimizers"),
    "ipex": ("intel_extension_for_pytorch", "intel_extension_for_pytorch.optim"),
    "jiant": ("jiant", "jiant.ext"),
    "labml": ("labml_nn",),
    "llama_cookbook": ("llama_cookbook", "llama_cookbook.policies"),
    "mmselfsup": ("mmselfsup", "mmselfsup.engine", "mmselfsup.engine.optimizers"),
    "mmpretrain": ("mmpretrain", "mmpretrain.engine", "mmpretrain.engine.optimizers"),
    "modelscope": ("modelscope", "modelscope.trainers", "modelscope.trainers.optimizer", "modelscope.utils"),
    "pl_bolts": ("pl_bolts", "pl_bolts.optimizers", "pl_bolts.utils"),
    "pylocron": ("holocron", "holocron.optim"),
    "pyro": ("pyro", "pyro.optim"),
    "pytext": ("pytext", "pytext.optimizer"),
    "pytorch_pretrained_bert": ("pytorch_pretrained_bert",),
    "pytorch_pretrained_gpt": ("pytorch_pretrained_bert",),
    "pytorch_transformers": ("pytorch_transformers",),
    "pywick": ("pywick",),
    "s3prl": ("s3prl",),
    "bregman": ("bregman",),
    "fracgrad": ("FracGrad",),
    "torchkbert": ("torchKbert",),
    "simclr": ("simclr", "simclr.modules"),
    "tape": ("tape",),
    "timm": ("timm", "timm.optim"),
    "torchbiggraph": ("torchbiggraph",),
}


def install(name: str, pinned: Sequence[str], folder: Path) -> Path:
    """Make the environment of a library if it is missing or has other versions; return its interpreter."""
    python, done = folder / name / "bin" / "python", folder / name / "pinned.txt"
    if not done.exists() or done.read_text(encoding="utf-8").split() != [*pinned]:
        venv.create(folder / name, with_pip=False)
        (own,) = (folder / name).glob("lib/python*/site-packages")
        lines = ["import site; " + "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())]
        for package in BARE.get(name, ()):
            place = str(own.joinpath(*package.split(".")))
            lines.append(
                f"import sys; from importlib import machinery, util; "
                f"bare = machinery.ModuleSpec({package!r}, None, is_package=True); "
                f"bare.submodule_search_locations.append({place!r}); "
                f"sys.modules[{package!r}] = util.module_from_spec(bare)"
            )
        (own / "shared.pth").write_text("\n".join([*lines, ""]), encoding="utf-8")
        for address in (item for item in pinned if "://" in item):  # a module that is no package
            urllib.request.urlretrieve(address, own / Path(address).name)
        packages = [item for item in pinned if "://" not in item]
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        if packages:
            subprocess.run([*pip, *packages], check=True)
        done.write_text("\n".join(pinned), encoding="utf-8")
    return python


def check(name: str, python: Path, output: Path) -> tuple[Result, bool]:
    """Check a library, one of the panel with its list; return the result, and whether the gate is green."""
    path = output / f"{name}.json"
    module, gate = "panel", ["--expectations", name]
    if name in BEYOND:
        module, gate = "beyond" if hasattr(beyond, name) else "beyond_later", ["--level", "must"]
    arguments = ["check", f"{TARGETS}.{module}:{name}", *gate, "--output", str(path)]
    done = subprocess.run([python, "-c", VERB, *arguments], check=False)
    return read(path), done.returncode == 0


def row(name: str, result: Result) -> str:
    """Return the line of the table: library, version, clauses held and checked, known and new failures."""
    clauses: dict[str, set[str]] = {}
    for case in result.cases:
        for clause in case.clauses:
            clauses.setdefault(clause, set()).add(case.outcome)
    checked = {clause: seen for clause, seen in clauses.items() if seen - {"unsupported"}}
    known = sum("known" in seen for seen in checked.values())
    new = sum(bool(seen & set(FAILING)) for seen in checked.values())
    held = len(checked) - sum("known" in seen or bool(seen & set(FAILING)) for seen in checked.values())
    version = result.implementation["version"]
    return f"| {name} | {version} | {held} of {len(checked)} | {known} | {new} |"


def row_of_musts(name: str, result: Result) -> str:
    """Return the line of the table: library, version, musts held and checked, and those that fail."""
    judged = judge(result).clauses
    musts = {clause: verdict for clause, verdict in judged.items() if spec.clauses()[clause].level == "must"}
    checked = [clause for clause, verdict in musts.items() if verdict != "unsupported"]
    wrong = [clause for clause in checked if musts[clause] in FAILING]
    held = len(checked) - len(wrong)
    version = result.implementation["version"]
    return f"| {name} | {version} | {held} of {len(checked)} | {', '.join(wrong)} |"


def main() -> int:
    """Check the libraries that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PINNED)}")
    parser.add_argument("--beyond", action="store_true", help=f"libraries of {', '.join(BEYOND)}")
    parser.add_argument("--environments", type=Path, default=Path("panel"))
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args()
    there, head, line = (BEYOND, HEAD_OF_MUSTS, row_of_musts) if options.beyond else (PINNED, HEAD, row)
    if unknown := [name for name in options.names if name not in there]:
        parser.error(f"there is no library {unknown[0]!r}; there are: {', '.join(there)}")
    options.output.mkdir(parents=True, exist_ok=True)
    lines, failed, results = [head, re.sub("[^|]+", "---", head)], False, []
    for name in options.names or there:
        try:
            python = install(name, there[name], options.environments.resolve())
        except (OSError, subprocess.CalledProcessError) as error:  # the others can still be checked
            print(f"{name} cannot be installed: {error}", file=sys.stderr)
            failed = True
            continue
        result, green = check(name, python, options.output)
        lines.append(line(name, result))
        failed = failed or not (green or options.beyond)
        results.append(str(options.output / f"{name}.json"))
    if results:
        command = [sys.executable, "-c", VERB, "report", *results, "--output", options.output / "site"]
        subprocess.run(command, check=True)
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
