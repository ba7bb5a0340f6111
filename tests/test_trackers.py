"""The real trackers, offline, in temporary folders: what they were told is read back from the files they wrote.

Each runs in a process of its own, with a home of its own, in which Python may not connect to anything but this machine.
A package that is missing is skipped on a laptop and a failure where `CI` is set.
"""
import json
import os
import struct
import subprocess
import sys
from importlib.util import find_spec

import pytest
from conftest import ROOT

NAMES = 'tensorboard', 'wandb', 'trackio', 'mlflow'

PRELUDE = '''
import json, os, signal, socket, sys, warnings
from pathlib import Path
outside, connect = [], socket.socket.connect
def local_only(self, address):
    if isinstance(address, tuple) and address[0] not in ('127.0.0.1', '::1', 'localhost'):
        outside.append(address)
        raise OSError(f'no network in this test: {address}')
    return connect(self, address)
socket.socket.connect = local_only
from g2c_rl.trackers import make_tracker
name, folder = sys.argv[1], Path(sys.argv[2])
nan, inf = float('nan'), float('inf')
def log(tracker, *steps):
    for step in steps:
        tracker.log(step, dict(reward_mean=step/8, kl=nan if step % 2 else step/16, loss=-inf, tokens=64, grad_norm=None))
'''

RESUMED = PRELUDE + '''
for steps in ((1, 2, 3), (4, 5)):                        # a run, and the same run resumed
    tracker = make_tracker(name, folder, dict(task='format', lr=.002, seed=0, out=None))
    log(tracker, *steps)
    tracker.close()
assert not outside, outside
'''

FAULTS = dict(
    tensorboard='''
import torch.utils.tensorboard as tb
writer = tb.writer.EventFileWriter                       # the disk is full: its writing thread has died
def full(self, *args): raise OSError(28, 'No space left on device')
writer.add_event = writer.flush = full''',
    wandb='''
import wandb
parents = {p: p.read_text().rpartition(')')[2].split()[1] for p in Path('/proc').glob('[0-9]*/stat') if p.exists()}
cores = [int(p.parent.name) for p,parent in parents.items() if parent == str(os.getpid()) and b'wandb' in (p.parent/'cmdline').read_bytes()]
assert cores
for pid in cores: os.kill(pid, signal.SIGKILL)''',
    trackio='''
import trackio
def gone(*args, **kwargs): raise ConnectionError('the store is gone')
trackio.Run.log = gone''',
    mlflow='''
import mlflow
from mlflow.tracking._tracking_service.utils import _get_store
_get_store().engine.dispose()
(folder/'mlflow.db').write_bytes(b'not a database' * 1000)''')

FAILS = PRELUDE + '''
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    tracker = make_tracker(name, folder, dict(task='format'))
    log(tracker, 1, 2)
    ours = lambda: [str(w.message) for w in caught if 'the run goes on' in str(w.message)]
    assert not ours(), ours()
    exec(sys.argv[3])
    log(tracker, *range(3, 10))
    tracker.close(); tracker.close()
print('RESULT', json.dumps(ours()))
'''

def needs(name):
    if find_spec(name): return
    (pytest.fail if os.environ.get('CI') else pytest.skip)(f'{name} is not installed; it is in the dev extra')

def start(code, name, tmp_path, *args, limit=240, **env):
    "Run a script in a world of its own"
    home = tmp_path/'home'
    home.mkdir(exist_ok=True)
    keep = {k: v for k,v in os.environ.items() if not k.startswith(('WANDB', 'MLFLOW', 'TRACKIO', 'HF_', 'XDG_'))}
    own = dict(HOME=str(home), USERPROFILE=str(home), XDG_CACHE_HOME=str(home/'cache'), XDG_CONFIG_HOME=str(home/'config'), XDG_DATA_HOME=str(home/'data'), HF_HOME=str(home/'hf'),
               HF_HUB_OFFLINE='1', TRACKIO_DIR=str(tmp_path/'trackio'), MPLCONFIGDIR=str(home/'mpl'), PYTHONPATH=str(ROOT),
               OMP_NUM_THREADS='1', NO_PROXY='*', GIT_CEILING_DIRECTORIES=str(tmp_path))
    done = subprocess.run([sys.executable, '-c', code, name, str(tmp_path/'first run'), *args], cwd=tmp_path, env=keep | own | env,
                          capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, f'{done.stdout}\n{done.stderr}'
    return done

# ---------- readers: {metric: {step: value}}, the settings, and how many runs there are

def read_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path/'first run'/'tensorboard')).Reload()
    config = events.Tensors('config/text_summary')[0].tensor_proto.string_val[0].decode()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()['scalars']}, config, 1

def wandb_records(path):
    "The records of an offline run: a log of blocks of 32 kB, of which wandb has a reader in Go only"
    from wandb.proto.wandb_internal_pb2 import Record
    data, at, parts = path.read_bytes(), 7, b''
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7: at += 32768 - at % 32768; continue
        length, kind = struct.unpack('<HB', data[at+4:at+7])
        if kind == 0: break
        parts, at = parts + data[at+7:at+7+length], at + 7 + length
        if kind in (1, 4):                                # whole, or the last part
            record = Record(); record.ParseFromString(parts)
            yield record
            parts = b''

def read_wandb(tmp_path):
    metrics, runs, config = {}, set(), ''
    for path in sorted((tmp_path/'first run'/'wandb').glob('offline-run-*/*.wandb'), key=lambda p: p.stat().st_mtime):
        for r in wandb_records(path):
            if r.HasField('run'):
                runs.add(r.run.run_id); config = ''.join(f'{c.key or c.nested_key[0]}: {c.value_json}\n' for c in r.run.config.update)
                assert r.run.display_name == 'first run'
            items = {i.key or '.'.join(i.nested_key): json.loads(i.value_json) for i in r.history.item}
            for name,value in items.items(): metrics.setdefault(name, {})[items['_step']] = value
    return {k: v for k,v in metrics.items() if k[0] != '_'}, config, len(runs)

def read_trackio(tmp_path):
    code = '''
import json
from trackio.sqlite_storage import SQLiteStorage as store
runs = store.get_runs('g2c_rl')
print('RESULT', json.dumps([runs, store.get_logs('g2c_rl', runs[0]), store.get_run_config('g2c_rl', runs[0])]))'''
    runs, rows, config = json.loads(start(code, 'trackio', tmp_path).stdout.split('RESULT ')[1])
    assert runs[0].startswith('first run-')
    metrics = {}
    for row in rows:
        for name,value in row.items():
            if name not in ('step', 'timestamp'): metrics.setdefault(name, {})[row['step']] = value
    return metrics, '\n'.join(f'{k}: {v}' for k,v in config.items()), len(runs)

def read_mlflow(tmp_path):
    code = '''
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(f'sqlite:///{sys.argv[2]}/mlflow.db')
runs = client.search_runs([client.get_experiment_by_name('g2c_rl').experiment_id])
metrics = {k: {m.step: m.value for m in client.get_metric_history(runs[0].info.run_id, k)} for k in runs[0].data.metrics}
print('RESULT', json.dumps([metrics, runs[0].data.params, runs[0].info.run_name, runs[0].info.status, len(runs)]))'''
    metrics, params, name, status, runs = json.loads(start(code, 'mlflow', tmp_path, MLFLOW_DISABLE_TELEMETRY='true').stdout.split('RESULT ')[1])
    assert name == 'first run' and status == 'FINISHED'
    return {k: {int(s): x for s,x in v.items()} for k,v in metrics.items()}, '\n'.join(f'{k}: {v}' for k,v in params.items()), runs

@pytest.mark.parametrize('name', NAMES)
def test_numbers_come_back(name, tmp_path):
    "A run and its resumption are one run; what was not measured is not there, nowhere as a zero"
    needs(name)
    start(RESUMED, name, tmp_path)
    metrics, config, runs = globals()[f'read_{name}'](tmp_path)
    assert metrics == dict(reward_mean={s: s/8 for s in range(1, 6)}, kl={s: s/16 for s in (2, 4)}, tokens={s: 64 for s in range(1, 6)})
    assert 'task: ' in config and 'format' in config and '0.002' in config
    assert runs == 1
    allowed = {'first run', 'home', 'trackio'}
    assert {p.name for p in tmp_path.iterdir()} <= allowed            # nothing beside the run's folder and the library's own store

@pytest.mark.parametrize('name', NAMES)
def test_one_that_fails_on_the_way_never_stops_a_run(name, tmp_path):
    needs(name)
    if name == 'wandb' and not os.path.isdir('/proc/self'): pytest.skip('finds its process in /proc')
    said = json.loads(start(FAILS, name, tmp_path, FAULTS[name]).stdout.split('RESULT ')[1])
    assert len(said) <= 2 and all(s.startswith(f'{name} failed and is left out from here on') for s in said), said
    if name != 'wandb': assert said                                    # whose own process may die unnoticed until the end

def test_a_server_that_does_not_answer(tmp_path):
    needs('mlflow')
    code = PRELUDE + '''
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    tracker = make_tracker(name, folder, {}); log(tracker, 1, 2); tracker.close()
print('RESULT', json.dumps([str(w.message) for w in caught if 'the run goes on' in str(w.message)]))'''
    said = json.loads(start(code, 'mlflow', tmp_path, MLFLOW_TRACKING_URI='http://127.0.0.1:9').stdout.split('RESULT ')[1])
    assert len(said) == 1 and 'mlflow could not be started and is left out' in said[0]

@pytest.mark.parametrize('name', NAMES)
def test_missing_packages_say_what_to_type(name, tmp_path):
    code = PRELUDE + '''
sys.modules[{'tensorboard': 'torch.utils.tensorboard'}.get(name, name)] = None
try: make_tracker(name, folder)
except ValueError as e: print(e)'''
    assert f'pip install {name}' in start(code, name, tmp_path).stdout

def test_a_run_with_a_tracker_is_the_same_run(tmp_path):
    "Through the command line, with the one that is the least trouble"
    needs('tensorboard')
    code = PRELUDE + '''
from g2c_rl.cli import main
words = 'train arithmetic --steps 2 --groups-per-step 2 --k 4 --exam-size 4 --out'.split()
assert main([*words, str(folder/'with'), '--tracker', name]) == 0 and main([*words, str(folder/'without')]) == 0
assert (folder/'with'/'metrics.jsonl').read_bytes() == (folder/'without'/'metrics.jsonl').read_bytes()
assert list((folder/'with'/'tensorboard').iterdir())'''
    start(code, 'tensorboard', tmp_path)
