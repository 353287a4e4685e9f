"""Without the POSIX modules models are created, saved and loaded; commands that need fcntl report it."""

import subprocess
import sys

CODE = """
import io, sys
from contextlib import redirect_stderr
import psutil, torch  # imported first: their own platform-dependent imports are not under test
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline"):
    sys.modules[name] = None

import crosshead
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
config = crosshead.CrossheadLlamaConfig(**sizes, mixers={"knocking": {}, "talking": {}})
model = crosshead.CrossheadLlamaForCausalLM(config)
model.save_pretrained("saved")
for options in ({}, {"trust_remote_code": True}):
    loaded = AutoModelForCausalLM.from_pretrained("saved", **options)
    assert torch.equal(loaded(torch.arange(5)[None]).logits, model(torch.arange(5)[None]).logits)

from crosshead_command.main import main
for line in sys.stdin:
    sys.argv = ["crosshead", *line.split()]
    said = io.TextIOWrapper(io.BytesIO())
    with redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            said.seek(0)
            print(end.code, said.read(), end="")
"""
NEED_POSIX = [
    "convert source out --mixer knocking",
    "fold source out",
    "verify source out",
    "probe layers source --text text.txt",
    "train small/smollm2_mixture --set output=out",
]


def test_models_work_and_commands_report_missing_fcntl(tmp_path):
    (tmp_path / "source").mkdir()
    command = [sys.executable, "-P", "-c", CODE]
    commands = "\n".join(NEED_POSIX)
    done = subprocess.run(command, cwd=tmp_path, input=commands, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(NEED_POSIX), lines
    for line in lines:
        assert line.startswith("1 crosshead: error: ") and "fcntl" in line and "Linux" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "source"]
