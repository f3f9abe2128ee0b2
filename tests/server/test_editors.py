"""llama.vim in a real editor: what is typed is completed, and a key takes the completion.

Neither editor nor plugin is a requirement of this project: a test is skipped without one of them.
docs/clients.md says which versions were tried.
"""

import os
import pty
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from server.running import Scripted, running, scripted, wait_until_ready

SAID = "urn a + b"
PLACES = {
    "vim": (".vim",),
    "nvim": (".config/nvim", ".local/share/nvim/site", ".local/share/nvim/lazy/llama.vim"),
}
# Of both its forms: the older one, of llama.cpp's tree, knows no defaults and has to be started.
SETTINGS = r"""
set nocompatible nomore noswapfile
set runtimepath^={plugin}
let g:llama_config = {
    \ 'endpoint': '{url}/infill', 'n_prefix': 256, 'n_suffix': 64, 'n_predict': 24,
    \ 't_max_prompt_ms': 500, 't_max_predict_ms': 3000, 'show_info': 2, 'auto_fim': v:true,
    \ 'max_line_suffix': 8, 'ring_n_chunks': 4, 'ring_chunk_size': 64, 'ring_scope': 1024,
    \ 'ring_update_ms': 200}
function! Take(timer)
  if !empty(mapcheck('<Tab>', 'i'))
    call timer_stop(a:timer)
    call feedkeys("\<Tab>\<Esc>:wqa!\<CR>", 't')
  endif
endfunction
function! Type(timer)
  call feedkeys("2GA\<CR>ret", 't')
  call timer_start(50, 'Take', {'repeat': -1})
endfunction
autocmd VimEnter * call llama#init() | call timer_start(1000, 'Type')
"""


def plugin(editor: str) -> Path | None:
    """The folder of the runtime path that has llama.vim; None without one."""
    for place in PLACES[editor]:
        home = Path.home() / place
        for found in (home, *home.glob("pack/*/start/*"), *home.glob("plugged/*")):
            if (found / "autoload" / "llama.vim").is_file():
                return found
    return None


@pytest.mark.parametrize("editor", PLACES)
def test_llama_vim_completes(editor: str, tmp_path: Path) -> None:
    path, found = shutil.which(editor), plugin(editor)
    if path is None or found is None:
        pytest.skip(f"{editor} is not on PATH" if path is None else "llama.vim is not installed")
    file, settings = tmp_path / "add.py", tmp_path / "vimrc"
    file.write_text("# Sums.\ndef add(a, b):\n    # The sum.\n")
    with running(lambda _: scripted(Scripted(SAID, ends=True), 4096)) as server:
        wait_until_ready(server)
        given = SETTINGS.replace("{url}", server.url).replace("{plugin}", str(found))
        settings.write_text(given)
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [path, "-u", str(settings), "-N", str(file)],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "xterm"},
        ) as process:  # fmt: skip
            os.close(theirs)
            screen = threading.Thread(target=_drain, args=(ours,), daemon=True)
            screen.start()
            try:
                process.wait(60)
            finally:
                process.kill()
        screen.join(10)
        os.close(ours)
        failed = [e for e in server.host.metrics.text().decode().splitlines() if 'status="4' in e]
    assert file.read_text().splitlines()[2].strip() == f"ret{SAID}"
    assert not failed


def _drain(screen: int) -> None:
    """Read what an editor draws, so that it never waits."""
    try:
        while os.read(screen, 65536):
            pass
    except OSError:  # it has ended
        return
