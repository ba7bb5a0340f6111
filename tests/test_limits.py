"""Verifiers that misbehave in every way somebody could think of, in workers that are ended for it; and nobody is left behind.

Where a time limit is meant to be reached it is short, and where not it is so long that a busy machine does not matter: no test
depends on how fast anything is.
"""
import faulthandler
import functools
import gc
import math
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from g2c_rl.baselm.model import load_baselm
from g2c_rl.evaluation import evaluate_policy
from g2c_rl.limits import LimitedVerifier
from g2c_rl.lora import add_lora
from g2c_rl.tasks import Task, VerifierError, get_family, held_out_tasks, score, verify_arithmetic, verify_format
from g2c_rl.trainer import GRPOTrainer

LINUX = Path('/proc/self/statm').exists()
linux = pytest.mark.skipif(not LINUX, reason='memory and processes are looked up in /proc')
forks = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
TASK = Task('Write the letter a:', 'a')
LONG = 60                        # seconds: never reached

def children(pid='self'):
    "The living processes that have this one as their parent"
    pid, found = os.getpid() if pid == 'self' else pid, []
    for file in Path('/proc').glob('[0-9]*/stat'):
        try: name, _, rest = file.read_text().rpartition(')')
        except OSError: continue
        state, parent = rest.split()[:2]
        if int(parent) == pid and state != 'Z': found.append(int(name.split()[0]))
    return [child for child in found if child not in OTHERS]

OTHERS = set()     # workers that earlier tests of this process keep, such as the one of `math_equal`

@pytest.fixture(autouse=True)
def only_ours():
    OTHERS.clear()
    OTHERS.update(children())

def alive(pid):
    try: return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError: return False

def soon(condition):
    "Whether something becomes true within a minute"
    for _ in range(6000):
        if condition(): return True
        time.sleep(.01)
    return False

# ---------- calls that never end; a C call that a signal handler cannot interrupt among them

class Unprintable(Exception):
    def __init__(self, code, text): super().__init__(code); self.text = text     # cannot be pickled and read again
    def __str__(self): return f'unprintable {self.text}'

def busy():
    while True: pass

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try: time.sleep(60)
        except BaseException: pass

def catches_everything():
    while True:
        try: sys.exit(1)
        except BaseException: pass

def locked():
    lock = threading.Lock(); lock.acquire(); lock.acquire()

def forks_and_hangs():
    os.fork(); time.sleep(600)

def waits_for_a_child(): subprocess.run(['sleep', '600'])

HANG = dict(regex=lambda: re.match('(a+)+$', 'a'*50 + 'b'), power=lambda: 10**10**8, loop=busy, sleep=lambda: time.sleep(600), deaf=deaf,
            catches_everything=catches_everything, locked=locked, stopped=lambda: os.kill(os.getpid(), signal.SIGSTOP),
            factorial=lambda: math.factorial(99_999_999), forks=forks_and_hangs, child=waits_for_a_child,
            alarm=lambda: (signal.signal(signal.SIGALRM, lambda *a: None), signal.alarm(1), busy()))

@forks
@pytest.mark.parametrize('name', HANG)
def test_what_hangs_is_ended(name):
    def verifier(task, completion): return HANG[name]() if completion == 'hang' else 1.
    with LimitedVerifier(verifier, seconds=.2) as limited:
        with pytest.raises(VerifierError) as e: score(limited, TASK, 'hang')
        for words in ('verifier (test_limits.py, line ', 'raised TimeoutError', 'limit of 0.2 s', 'allow it more seconds', repr(TASK.prompt), "'hang'"): assert words in str(e.value)
        assert str(e.value).count(repr(TASK.prompt)) == 1
        limited.seconds = LONG
        assert limited(TASK, 'x') == 1.          # by another worker
    if LINUX: assert soon(lambda: not children())

# ---------- memory

@linux
@pytest.mark.parametrize('eat', [lambda: bytearray(10**9), lambda: [0]*10**9, lambda: 'a'*10**9, lambda: list(range(10**9)),
                                 lambda: b''.join(bytes([i % 256])*10**6 for i in range(10**6)), lambda: torch.zeros(10**9),
                                 lambda: __import__('mmap').mmap(-1, 10**9)], ids='bytearray list str growing join torch mmap'.split())
def test_memory_is_limited(eat):
    def verifier(task, completion): return float(len(eat())) if completion == 'eat' else 1.
    with LimitedVerifier(verifier, LONG, memory_mb=100) as limited:
        with pytest.raises(VerifierError) as e: score(limited, TASK, 'eat')
        assert 'MemoryError: it wanted more than the limit of 100 MB' in str(e.value) or 'allocate' in str(e.value)
        assert limited(TASK, 'x') == 1.

@linux
def test_the_memory_limit_counts_from_the_start():
    "This process has gigabytes of address space already; half of the limit is free, twice the limit is not"
    def verifier(task, completion): return float(len(bytearray(int(completion))) > 0)
    with LimitedVerifier(verifier, LONG, memory_mb=200) as limited:
        for _ in range(3): assert limited(TASK, str(100 * 2**20)) == 1.        # what is given back may be taken again
        with pytest.raises(MemoryError): limited(TASK, str(400 * 2**20))
        assert limited(TASK, str(100 * 2**20)) == 1.
    with LimitedVerifier(verifier, LONG) as free: assert free(TASK, str(400 * 2**20)) == 1.

@linux
def test_a_memory_error_that_is_caught_is_none():
    def verifier(task, completion):
        try: bytearray(10**9)
        except MemoryError: return .5
    with LimitedVerifier(verifier, LONG, 100) as limited: assert limited(TASK, '') == .5

def test_memory_limits_are_refused_where_they_would_mean_nothing(monkeypatch):
    monkeypatch.setattr(Path, 'exists', lambda self: False); monkeypatch.setattr(sys, 'platform', 'darwin')
    with pytest.raises(ValueError, match='memory_mb=100 cannot be enforced on darwin, only on Linux.*the time limit works'): LimitedVerifier(verify_format, 1, 100)
    assert LimitedVerifier(verify_format, 1).method == 'spawn'

# ---------- workers that die

def own_segfault():
    import ctypes
    ctypes.string_at(0)

def exits_with_a_child():
    "The child holds the pipes open; the end of the worker must be seen all the same"
    if os.fork() == 0: time.sleep(600)
    os._exit(5)

DEATHS = dict(sys_exit=(lambda: sys.exit(0), 'SystemExit: 0'), sys_exit_text=(lambda: sys.exit('usage: prog'), 'SystemExit: usage: prog'),
              os_exit=(lambda: os._exit(0), 'exit status 0'), os_exit_7=(lambda: os._exit(7), 'exit status 7'),
              interrupt=(lambda: signal.raise_signal(signal.SIGINT), 'SIGINT'), abort=(os.abort, 'SIGABRT'),
              keyboard=(lambda: (_ for _ in ()).throw(KeyboardInterrupt), 'KeyboardInterrupt'),
              killed=(lambda: os.kill(os.getpid(), signal.SIGKILL), 'SIGKILL'), segfault=(own_segfault, 'SIGSEGV'),
              closes=(lambda: os.closerange(3, 4096), 'files that it has not opened'), with_a_child=(exits_with_a_child, 'exit status 5'),
              closes_and_waits=(lambda: (os.closerange(3, 4096), time.sleep(600)), 'closed the connection'))

@forks
@pytest.mark.parametrize('name', DEATHS)
def test_a_worker_that_ends_is_replaced(name):
    fault, said = DEATHS[name]
    def verifier(task, completion): return (faulthandler.disable(), fault()) if completion == 'die' else 1.
    with LimitedVerifier(verifier, LONG) as limited:
        for _ in range(2):
            with pytest.raises(VerifierError) as e: score(limited, TASK, 'die')
            assert 'verifier (test_limits.py, line ' in str(e.value) and 'raised ChildProcessError: ' in str(e.value) and said in str(e.value) and "the completion 'die'" in str(e.value)
            assert limited(TASK, 'x') == 1.
    if LINUX: assert soon(lambda: not children())

@forks
def test_killed_from_outside_in_the_middle_of_a_call():
    def verifier(task, completion): return 1. if completion == 'x' else time.sleep(600)
    with LimitedVerifier(verifier) as limited:
        assert limited(TASK, 'x') == 1.
        worker = limited._worker.process.pid
        threading.Timer(.2, os.kill, (worker, signal.SIGKILL)).start()
        with pytest.raises(ChildProcessError, match='its worker was killed by SIGKILL: from outside, or by the system'): limited(TASK, 'wait')
        assert limited(TASK, 'x') == 1. and limited._worker.process.pid != worker

@forks
def test_killed_from_outside_between_two_calls():
    "No call is lost, so there is nothing to complain of"
    with LimitedVerifier(lambda task, completion: float(os.getpid())) as limited:
        first = limited(TASK, '')
        os.kill(int(first), signal.SIGKILL)
        assert soon(lambda: not limited._worker.process.is_alive())
        assert limited(TASK, '') not in (first, os.getpid())

# ---------- what comes through

def raises(task, completion):
    if completion == 'key': raise KeyError('furlong')
    if completion == 'os': open('/no/such/file')
    if completion == 'unicode': b'\xff'.decode()
    if completion == 'own': raise Unprintable(1, 'text')
    if completion == 'deep': return raises(task, completion)
    if completion == 'group': raise ExceptionGroup('several', [ValueError('one')])
    if completion == 'surrogate': raise ValueError('\ud800')
    if completion == 'timeout': raise TimeoutError('the server is slow')
    if completion == 'memory': raise MemoryError('not really')
    if completion == 'stop': raise StopIteration(3)
    raise ValueError

@forks
@pytest.mark.parametrize('completion', 'key os unicode own deep group surrogate timeout memory stop other'.split())
def test_an_error_is_what_it_would_have_been_without_a_worker(completion):
    with pytest.raises(Exception) as bare: raises(TASK, completion)
    with LimitedVerifier(raises, LONG) as limited:
        assert limited.__name__ == 'raises'
        with pytest.raises(Exception) as e: limited(TASK, completion)
        assert type(e.value).__name__ == type(bare.value).__name__ and str(e.value) == str(bare.value)
        if type(bare.value).__module__ == 'builtins' and completion != 'group': assert isinstance(e.value, type(bare.value))
        assert 'in raises' in e.value.__notes__[0]                       # the traceback in the worker
        worker = limited._worker.process.pid
        with pytest.raises(VerifierError) as wrapped: score(limited, TASK, completion)
        with pytest.raises(VerifierError) as wanted: score(raises, TASK, completion)
        assert str(wrapped.value) == str(wanted.value)
        assert limited._worker.process.pid == worker                     # an error is no breach

@forks
@pytest.mark.parametrize('value, number', [(1, 1.), (True, 1.), (.5, .5), (torch.tensor(.25), .25), (torch.ones(()).numpy(), 1.), (-3, -3.)])
def test_numbers_come_through(value, number):
    with LimitedVerifier(lambda task, completion: value, LONG) as limited: assert score(limited, TASK, '') == score(lambda *a: value, TASK, '') == number

@forks
@pytest.mark.parametrize('value', [None, 'right', [1.], torch.ones(2), float('nan'), float('inf'), 10**400, object(), lambda: 1], ids=lambda v: str(type(v).__name__))
def test_what_is_no_number_is_refused(value):
    with LimitedVerifier(lambda task, completion: value, LONG) as limited, pytest.raises(VerifierError, match='<lambda>'): score(limited, TASK, '')

def prints(task, completion):
    print('printed', completion); print('to stderr', file=sys.stderr)
    sys.stdout.write('no newline'); sys.stdout.buffer.write(b'\xff bytes\n')
    os.write(1, b'raw\n'); subprocess.run(['echo', 'from a child'], stdin=subprocess.DEVNULL)
    if completion == 'close': sys.stdout.close()
    if completion == 'replace': sys.stdout = None
    return 1.

@forks
def test_what_is_printed_appears_and_harms_nothing(capsys):
    with LimitedVerifier(prints, LONG) as limited:
        for completion in ('a', '\x1b[2J\x00{}\n', 'close', 'replace', 'a'): assert limited(TASK, completion) == 1.
    out, err = capsys.readouterr()
    assert out.startswith('printed a\nno newline\\xff bytes\n') and out.count('printed a') == 2 and err.count('to stderr') == 5

@forks
def test_a_flood_of_output_does_not_stop_the_worker(capsys):
    with LimitedVerifier(lambda task, completion: print('x'*10_000_000) or 1., LONG) as limited: assert limited(TASK, '') == 1.
    assert len(capsys.readouterr().out) == 10_000_001

@forks
@pytest.mark.parametrize('completion', ['', '\x00', '\ud800', 'é'*10, 'a'*5_000_000, '{"value": 1}\n'], ids=range(6))
def test_any_completion_arrives_as_it_is(completion):
    with LimitedVerifier(lambda task, text: float(text == completion and task == TASK), LONG) as limited: assert limited(TASK, completion) == 1.

@dataclass(frozen=True)
class Rich(Task): more: dict = field(default_factory=dict)

@forks
def test_a_task_of_ones_own_arrives():
    task = Rich('a', 1, more=dict(table=[1, 2, {3}]))
    with LimitedVerifier(lambda t, c: float(t == task and type(t) is Rich), LONG) as limited: assert limited(task, '') == 1.

@forks
def test_a_task_that_cannot_be_sent_is_an_error_and_not_the_end():
    with LimitedVerifier(lambda t, c: 1., LONG) as limited:
        with pytest.raises(VerifierError, match='[Pp]ickle'): score(limited, Rich('a', 1, more=dict(f=lambda: 1)), '')
        assert limited(TASK, '') == 1.

@forks
def test_a_worker_cannot_make_the_parent_run_anything(tmp_path):
    "Whoever holds the worker's pipe, such as a program that a policy wrote, can lie about the score and do no more"
    class Trap:
        def __reduce__(self): return Path.touch, (tmp_path/'trace',)
    def verifier(task, completion):
        from multiprocessing.connection import Connection
        for fd in range(3, 100):
            try: ours = stat.S_ISSOCK(os.fstat(fd).st_mode)
            except OSError: continue
            if not ours: continue
            c = Connection(fd)
            c.send_bytes(pickle.dumps(Trap()))
            c._handle = None                                             # not closed
        return 1.
    with LimitedVerifier(verifier, LONG) as limited, pytest.raises(ChildProcessError, match='no answer but something else'): limited(TASK, '')
    assert not list(tmp_path.iterdir())

# ---------- forks, threads, state

@forks
def test_a_verifier_that_forks_and_forgets_to_end_its_child():
    def verifier(task, completion):
        os.fork()
        if completion == 'raise': raise ValueError('twice')
        if completion == 'exit' : sys.exit(1)
        return float(completion)
    with LimitedVerifier(verifier, LONG) as limited:
        for i in range(20): assert limited(TASK, str(i)) == i            # each answer belongs to its question
        for i in range(3):
            with pytest.raises(ValueError, match='twice'): limited(TASK, 'raise')
            with pytest.raises(ChildProcessError, match='SystemExit'): limited(TASK, 'exit')
            assert limited(TASK, str(i)) == i

@forks
def test_one_worker_answers_many_calls():
    with LimitedVerifier(lambda task, completion: float(os.getpid()), LONG, 500 if LINUX else None) as limited:
        assert len({limited(TASK, str(i)) for i in range(100)}) == 1

@forks
def test_two_at_once_and_one_within_another():
    outer, inner = LimitedVerifier(lambda t, c: inner(t, c) + 1, LONG), LimitedVerifier(lambda t, c: float(c), LONG)
    with inner, outer:
        assert inner(TASK, '1') == 1. and outer(TASK, '2') == 3. and inner(TASK, '3') == 3. and outer(TASK, '4') == 5.

@forks
def test_threads_take_turns():
    with LimitedVerifier(lambda task, completion: float(completion), LONG) as limited:
        wrong = []
        def ask(start): wrong.extend(i for i in range(start, start + 100) if limited(TASK, str(i)) != i)
        threads = [threading.Thread(target=ask, args=(1000*n,)) for n in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
    assert wrong == []

@forks
def test_the_copy_of_a_process_has_a_worker_of_its_own():
    "A data loader's worker, say: it must neither talk to its parent's worker nor end it"
    with LimitedVerifier(lambda task, completion: float(os.getpid()), LONG) as limited:
        ours = limited(TASK, '')
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            try: theirs = limited(TASK, ''); limited.close(); os.write(w, str(theirs).encode())
            finally: os._exit(0)
        os.close(w); os.waitpid(pid, 0)
        theirs = float(os.read(r, 100)); os.close(r)
        assert theirs != ours and limited(TASK, '') == ours

# ---------- nobody is left behind

SCRIPT = '''
import os, re, signal, sys, time
from g2c_rl.limits import LimitedVerifier
from g2c_rl.tasks import Task
def verifier(task, completion):
    if completion == 'regex': re.match('(a+)+$', 'a'*50 + 'b')
    if completion == 'sleep': time.sleep(600)
    if completion == 'child': os.fork(); re.match('(a+)+$', 'a'*50 + 'b')
    if completion == 'deaf':
        signal.signal(signal.SIGTERM, signal.SIG_IGN); print('never seen')
        if os.fork() == 0: time.sleep(600)
    return float(os.getpid())
if __name__ == '__main__':
    limited = LimitedVerifier(verifier, method=sys.argv[2] if len(sys.argv) > 2 else None)
    print(int(limited(Task('a', 1), '')), flush=True)
    try: print(limited(Task('a', 1), sys.argv[1]), flush=True)
    except KeyboardInterrupt: print('interrupted', flush=True); print(limited(Task('a', 1), '') > 0, flush=True)
'''

def start_script(tmp_path, *args):
    (tmp_path/'script.py').write_text(SCRIPT)
    p = subprocess.Popen([sys.executable, str(tmp_path/'script.py'), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    line = b''
    while not line.endswith(b'\n'): line += os.read(p.stdout.fileno(), 1)     # `readline` would take more, which `communicate` would miss
    worker = int(line)
    time.sleep(.3)                                                       # so that it is in the middle of the second call
    return p, worker

@linux
@pytest.mark.parametrize('doing', ['regex', 'sleep', 'child'])
def test_the_worker_ends_with_its_parent_even_by_kill(tmp_path, doing):
    p, worker = start_script(tmp_path, doing)
    family = [worker, *children(worker)]
    assert len(family) == 1 + (doing == 'child')
    p.kill(); p.communicate()
    assert soon(lambda: not any(map(alive, family)))

@linux
def test_ctrl_c_leaves_no_orphans_and_the_next_call_works(tmp_path):
    "Ctrl-C in a terminal goes to the whole process group"
    p, worker = start_script(tmp_path, 'regex')
    os.killpg(p.pid, signal.SIGINT)
    out, err = p.communicate(timeout=LONG)
    assert out.split() == ['interrupted', 'True'] and p.returncode == 0 and err == ''     # not a word from the worker
    assert not alive(worker)

@linux
@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_python_can_end_while_a_worker_waits(tmp_path, method):
    "Without `close`, and with a worker that ignores SIGTERM and has a child"
    p, worker = start_script(tmp_path, 'deaf', method)
    out, err = p.communicate(timeout=LONG)
    assert p.returncode == 0 and err == '' and 'never seen' in out
    assert soon(lambda: not alive(worker))

@linux
def test_a_verifier_that_is_forgotten_takes_its_worker_along():
    limited = LimitedVerifier(lambda task, completion: 1., LONG); limited(TASK, '')
    assert len(children()) == 1
    del limited; gc.collect()
    assert soon(lambda: not children())

@linux
def test_nothing_grows_over_thousands_of_calls():
    "5,000 calls, 50 replaced workers, 50 objects: as many files and processes as before"
    def verifier(task, completion): return os._exit(1) if completion == 'die' else 1.
    files = lambda: len(os.listdir('/proc/self/fd'))
    with LimitedVerifier(verifier, LONG, 500) as limited:
        limited(TASK, ''); before = files(), len(children())
        for i in range(5000):
            if i % 100 == 50:
                with pytest.raises(ChildProcessError): limited(TASK, 'die')
            else: limited(TASK, '')
        limited(TASK, ''); assert (files(), len(children())) == before
        for _ in range(50):
            with LimitedVerifier(verifier, LONG) as another: another(TASK, '')
        assert (files(), len(children())) == before
    assert (files(), len(children())) == (before[0] - 4, 0)              # two pipes, and two by which `multiprocessing` watches the process

@forks
def test_interrupts_at_any_time_leave_it_usable():
    "A timer interrupts calls and starts; each later answer still belongs to its question"
    interrupted, limited = 0, LimitedVerifier(lambda task, completion: float(completion), LONG)
    before = signal.signal(signal.SIGALRM, lambda *a: signal.raise_signal(signal.SIGINT))
    try:
        for i in range(120):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, .0002 + .0001*(i % 40))
                    for j in range(50): assert limited(TASK, str(j)) == j
                finally: signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt: interrupted += 1                  # outside, for it may also come just before the timer is stopped
            assert limited(TASK, str(i)) == i
    finally: signal.signal(signal.SIGALRM, before)
    limited.close()
    assert interrupted > 60
    if LINUX: assert soon(lambda: not children())

# ---------- the other way to start

def test_spawned_workers():
    limited = LimitedVerifier(verify_format, LONG, 500 if LINUX else None, method='spawn')
    task = Task('Reply in JSON. {"answer":', 'blue', prefix='{"answer":')
    with limited: assert [limited(task, c) for c in (' "blue"}', ' blue}', ' "red"}')] == [1., 0., 1.]

@pytest.mark.parametrize('verifier', [lambda task, completion: 1., functools.partial(print, sep=lambda: 1)])
def test_what_cannot_be_spawned_says_how_it_could(verifier):
    with LimitedVerifier(verifier, LONG, method='spawn') as limited, pytest.raises(VerifierError, match='define it in a file of its own'): score(limited, TASK, '')

def test_default_is_fork_on_linux_only(monkeypatch):
    for platform,method in (('linux', 'fork'), ('darwin', 'spawn'), ('win32', 'spawn')):
        monkeypatch.setattr(sys, 'platform', platform); assert LimitedVerifier(verify_format).method == method

# ---------- in training

def trained(verifier, steps=4):
    model, tokenizer = load_baselm()
    trainer = GRPOTrainer(add_lora(model), tokenizer, get_family('arithmetic').make, verifier, groups_per_step=4, max_new_tokens=8)
    history = trainer.train(steps)
    return {k: str(v) for k,v in history.items() if not k.startswith('seconds')}, [p.detach().clone() for p in trainer.parameters]

@forks
def test_training_is_the_same():
    with LimitedVerifier(verify_arithmetic, LONG, 500 if LINUX else None) as limited: (history, weights), (wanted, exact) = trained(limited), trained(verify_arithmetic)
    assert history == wanted and all(a.equal(b) for a,b in zip(weights, exact))

@forks
def test_a_worker_may_use_torch_although_it_is_a_fork():
    "Threads do not survive a fork; torch in the worker must not wait for them"
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        a = torch.ones(500, 500); (a @ a).sum()                          # the pool has its threads
        with LimitedVerifier(lambda task, completion: (a @ a).sum(), LONG) as limited: assert limited(TASK, '') == 500.**3
    finally: torch.set_num_threads(before)

@forks
def test_an_exam_with_limits():
    family = get_family('arithmetic'); exam = held_out_tasks(family, 10); model, tokenizer = load_baselm()
    with LimitedVerifier(verify_arithmetic, LONG) as limited:
        assert evaluate_policy(model, tokenizer, exam, limited, 8).scores == evaluate_policy(model, tokenizer, exam, verify_arithmetic, 8).scores
