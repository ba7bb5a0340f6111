"""The live view in a real Jupyter kernel: it is drawn in place, an interrupt leaves it at the last whole step, and training goes on.

And outside of one, where IPython is not even loaded.
"""
import os
import queue
import re
import subprocess
import sys

import pytest
from conftest import ROOT

ENV = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
SET_UP = '''
from g2c_rl.baselm.model import load_baselm
from g2c_rl.lora import add_lora, adapters
from g2c_rl.tasks import get_family
from g2c_rl.trainer import GRPOTrainer
from g2c_rl.live import LiveView
family = get_family('format')
model, tokenizer = load_baselm()
def verifier(task, completion): return float(len(completion) % 2)
trainer = GRPOTrainer(add_lora(model), tokenizer, family.make, verifier, groups_per_step=2, max_new_tokens=6)
'''

@pytest.fixture(scope='module')
def kernel(tmp_path_factory):
    from jupyter_client.manager import start_new_kernel
    home = str(tmp_path_factory.mktemp('home'))
    manager, client = start_new_kernel(kernel_name='python3', env=ENV | dict(IPYTHONDIR=home, MPLCONFIGDIR=home), startup_timeout=120)
    yield manager, client
    client.stop_channels(); manager.shutdown_kernel(now=True)

def execute(kernel, code, interrupt_after=None):
    "Run a cell, interrupt it when so many drawings have come; its messages and its reply"
    manager, client = kernel
    sent, messages, drawn = client.execute(code), [], 0
    for _ in range(10_000):
        try: m = client.get_iopub_msg(timeout=120)
        except queue.Empty: pytest.fail(f'the kernel is silent; {messages[-3:]}')
        if m['parent_header'].get('msg_id') != sent: continue
        messages.append(m)
        if m['msg_type'] == 'status' and m['content']['execution_state'] == 'idle': break
        drawn += m['msg_type'] in ('display_data', 'update_display_data')
        if drawn == interrupt_after: manager.interrupt_kernel(); interrupt_after = None
    while True:
        reply = client.get_shell_msg(timeout=120)
        if reply['parent_header'].get('msg_id') == sent: return messages, reply['content']

def of(messages, kind): return [m['content'] for m in messages if m['msg_type'] == kind]

def printed(messages): return ''.join(c['text'] for c in of(messages, 'stream') if c['name'] == 'stdout')

def steps(content): return tuple(map(int, re.search(r'step (\d+) of (\d+)', content['data']['text/plain']).groups()))

def test_drawn_in_place_interrupted_and_going_on(kernel):
    _, reply = execute(kernel, SET_UP)
    assert reply['status'] == 'ok', reply
    messages, reply = execute(kernel, 'trainer.train(1000, callback=LiveView(share=.5))', interrupt_after=3)
    assert reply['status'] == 'error' and reply['ename'] == 'KeyboardInterrupt'
    first, updates = of(messages, 'display_data'), of(messages, 'update_display_data')
    assert len(first) == 1 and len(updates) >= 2                         # one display, drawn again and again
    ids = {c['transient']['display_id'] for c in first + updates}
    assert len(ids) == 1
    shown = [steps(c) for c in first + updates]
    assert shown == sorted(shown) and shown[0] == (1, 1000) and {total for _,total in shown} == {1000}
    for c in first + updates:
        html = c['data']['text/html']
        assert 'data:image/png;base64,' in html and '<table>' in html and 'Reply in JSON.' in html
    messages, reply = execute(kernel, 'print(len(trainer.history["loss"]), {len(v) for v in trainer.history.values()}, '
                                      '{m.enabled for m in adapters(model).values()}, model.training)')
    done = shown[-1][0]                                                  # the last whole step is shown, although the cell was interrupted
    assert printed(messages).split() == [str(done), f'{{{done}}}', '{True}', 'False']
    messages, reply = execute(kernel, 'history = trainer.train(2, callback=LiveView()); print(len(history["loss"]))')
    assert reply['status'] == 'ok' and int(printed(messages)) == done + 2
    assert steps((of(messages, 'display_data') + of(messages, 'update_display_data'))[-1]) == (done + 2, done + 2)

def test_a_view_used_again_has_a_display_in_each_cell(kernel):
    execute(kernel, SET_UP + 'view = LiveView()')
    for _ in range(2):
        messages, reply = execute(kernel, 'trainer.train(2, callback=view);')
        assert reply['status'] == 'ok' and len(of(messages, 'display_data')) == 1

def test_what_a_policy_writes_does_no_harm(kernel):
    "HTML, half a surrogate pair, an escape sequence, a direction mark: the kernel can send it, and nothing of it is live"
    execute(kernel, SET_UP + r'''decode = tokenizer.decode
class Nasty(type(tokenizer)):
    def decode(self, ids): return super().decode(ids) + '<script>alert(1)</script>\ud800\x1b[2J\u202e'
tokenizer.__class__ = Nasty''')
    messages, reply = execute(kernel, 'trainer.train(1, callback=LiveView());')
    assert reply['status'] == 'ok'
    html = of(messages, 'display_data')[0]['data']['text/html']
    assert '&lt;script&gt;' in html and not any(bad in html for bad in ('<script', '\ud800', '\x1b', '\u202e'))

def test_a_failing_verifier_leaves_the_last_whole_step(kernel):
    execute(kernel, SET_UP + '''
calls = []
def verifier(task, completion):
    calls.append(1)
    return float(len(calls) % 2) if len(calls) < 16*3 + 5 else 'text'
trainer.verifier = verifier''')
    messages, reply = execute(kernel, 'trainer.train(100, callback=LiveView(share=.0001))')       # time for the first drawing alone
    assert reply['ename'] == 'VerifierError'
    assert [steps(c) for c in of(messages, 'display_data') + of(messages, 'update_display_data')] == [(1, 100), (3, 100)]

def test_shown_without_being_asked(kernel):
    "In Jupyter `trainer.train` shows itself, alarms included; False means silence"
    execute(kernel, SET_UP.replace('from g2c_rl.live import LiveView', '') + '''
trainer.verifier, trainer.on_error = (lambda task, completion: 'text'), 'skip'
''')
    messages, reply = execute(kernel, 'trainer.train(12);')
    assert reply['status'] == 'ok' and len(of(messages, 'display_data')) == 1
    last = (of(messages, 'display_data') + of(messages, 'update_display_data'))[-1]
    assert steps(last) == (12, 12) and '<b>!</b> verifier (' in last['data']['text/html'] and 'not judged 192' in last['data']['text/plain']
    messages, reply = execute(kernel, 'trainer.train(2, callback=False);')
    assert reply['status'] == 'ok' and not of(messages, 'display_data')

def test_nothing_is_shown_elsewhere():
    code = SET_UP.replace('from g2c_rl.live import LiveView', '') + 'trainer.train(2)\nimport sys; assert "IPython" not in sys.modules and "g2c_rl.live" not in sys.modules'
    done = subprocess.run([sys.executable, '-c', code], env=ENV, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')

def test_outside_of_jupyter():
    "Lines of text, the last step among them, and IPython is never loaded"
    code = SET_UP + 'trainer.train(3, callback=LiveView())\nimport sys; assert "IPython" not in sys.modules'
    done = subprocess.run([sys.executable, '-c', code], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith('step 1 of 3  reward ') and lines[-1].startswith('step 3 of 3  reward ') and done.stderr == ''

def test_in_a_terminal_ipython_it_is_text_too(tmp_path):
    code = SET_UP + 'trainer.train(2, callback=LiveView());\n'
    done = subprocess.run([sys.executable, '-m', 'IPython', '--no-banner', '--colors=NoColor', '-c', code], env=ENV | dict(IPYTHONDIR=str(tmp_path)),
                          capture_output=True, text=True)
    assert done.returncode == 0 and 'step 2 of 2  reward ' in done.stdout and 'IPython.core.display' not in done.stdout, done.stderr

def test_drawing_takes_a_small_share_of_the_time():
    "By the clock that the view itself looks at: less than its share and the two drawings that are always made"
    code = SET_UP + '''
from time import monotonic
from types import SimpleNamespace
import IPython.display
view = LiveView(share=.1)
view.shell, view._show, spent = object(), lambda page: None, []
draw = view.draw
def timed():
    start = monotonic(); draw(); spent.append(monotonic() - start)
view.draw = timed
trainer.train(1, callback=view)                     # matplotlib looks for its fonts
del spent[:]
start = monotonic(); trainer.train(60, callback=view); total = monotonic() - start
print(sum(spent[:-1]) / total, len(spent))
'''
    done = subprocess.run([sys.executable, '-c', code], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    share, drawn = done.stdout.split()
    assert float(share) < .2 and int(drawn) < 60
