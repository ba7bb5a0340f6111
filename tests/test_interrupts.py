"""Ctrl-C at any time leaves a trainer that can go on, and is exactly as far as its record says.

The interrupts are real signals, sent at the n-th line that Python executes, with n drawn at random from all the lines of a step.
"""
import signal
import sys
import threading
from random import Random
from types import SimpleNamespace

import pytest
import torch
from test_rl import begins_right, make_trainer

from g2c_rl import trainer as trainer_module
from g2c_rl.lora import adapters

STEPS = 3
SOLUTIONS = SimpleNamespace(GRPOTrainer=trainer_module.GRPOTrainer)

def fresh(**kwargs): return make_trainer(SOLUTIONS, lr=.05, **kwargs)

def parameters(trainer): return torch.cat([p.detach().flatten() for p in trainer.parameters])

def state(trainer):
    "What an interrupt must not leave behind"
    modules = [m for p in (trainer.model, trainer.reference) if p is not None for m in p.modules()]
    return [m.training for m in modules], [m.enabled for m in adapters(trainer.model).values()], torch.is_grad_enabled(), signal.getsignal(signal.SIGINT)

SWITCHES = 'frozen adapters_off eval_mode no_grad __enter__ __exit__ set_grad_enabled train train_step _whole_steps'.split()

class Interrupt:
    "Counts the lines that are executed, and presses Ctrl-C at the n-th"
    def __init__(self, n=None): self.n, self.lines, self.where, self.switches = n, 0, None, {}

    def __call__(self, frame, event, arg):
        if frame.f_globals.get('__name__') in (__name__, 'threading'): return None
        if event == 'line':
            self.lines += 1
            if frame.f_code.co_name in SWITCHES: self.switches.setdefault((frame.f_code.co_name, frame.f_lineno), self.lines)
            if self.lines == self.n:
                self.where = f'{frame.f_code.co_name}, line {frame.f_lineno} of {frame.f_code.co_filename}'
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self

def interrupted(trainer, n, steps=STEPS):
    "Train, and press Ctrl-C at the n-th line; how it went"
    spy, before = Interrupt(n), sys.gettrace()
    sys.settrace(spy)
    try: trainer.train(steps)
    except KeyboardInterrupt: pass
    else: assert n is None, 'Ctrl-C was lost'
    finally: sys.settrace(before)
    return spy

@pytest.fixture(scope='module')
def undisturbed():
    "The parameters after each step of a run that nobody interrupts, and the lines it executes"
    trainer, path = fresh(), []
    trainer.train(1)                                     # the first time there is more to do
    spy = interrupted(fresh(), None)
    trainer = fresh(); path.append(parameters(trainer))
    trainer.train(STEPS, lambda t, m: path.append(parameters(t)))
    assert len(path) == STEPS + 1 and not any(a.equal(b) for a,b in zip(path, path[1:])) and spy.lines > 1000
    return path, spy

def check(trainer, path, before, where):
    steps = {len(values) for values in trainer.history.values()} or {0}
    assert len(steps) == 1, f'half a record, {where}'
    done = steps.pop()
    assert parameters(trainer).equal(path[done]), f'the parameters are not those after {done} steps, {where}'
    assert state(trainer) == before, where
    memory = {int(s['step']) for s in trainer.optimizer.state.values()} or {0}
    assert memory == {done}, f'the optimizer has taken {memory} steps, {where}'
    trainer.train(2)
    assert {len(values) for values in trainer.history.values()} == {done + 2}
    assert state(trainer) == before, where

@pytest.mark.parametrize('seed', range(4))
def test_ctrl_c_at_any_line(undisturbed, seed):
    path, spy = undisturbed
    rng, seen = Random(seed), set()
    for _ in range(40):
        trainer = fresh(); before = state(trainer)
        where = interrupted(trainer, rng.randint(1, spy.lines)).where
        check(trainer, path, before, where)
        seen.add(where)
    assert len(seen) > 20                                # and not always at the same place

def test_ctrl_c_wherever_something_is_switched(undisturbed):
    "Modes, adapters, gradients, handlers: at every line that switches one of them on or off"
    path, spy = undisturbed
    assert len(spy.switches) > 60
    for n in spy.switches.values():
        trainer = fresh(); before = state(trainer)
        check(trainer, path, before, interrupted(trainer, n).where)

def in_frozen(trainer): trainer.model.register_forward_pre_hook(lambda m, a: press() if not all(state(trainer)[1]) else None)
def in_verifier(trainer):
    calls = []
    def verifier(task, completion): calls.append(1); return press() if len(calls) == 20 else begins_right(task, completion)
    trainer.verifier = verifier
def in_backward(trainer): trainer.parameters[0].register_hook(lambda grad: press() or grad)
def in_optimizer(trainer):
    adam = sys.modules['torch.optim.adam']
    update = adam.adam
    def pressed_in(*args, **kwargs): press(); return update(*args, **kwargs)
    adam.adam = pressed_in
    return lambda: setattr(adam, 'adam', update)
def in_sampling(trainer): trainer.model.register_forward_hook(lambda m, a, out: press() if not torch.is_grad_enabled() and all(state(trainer)[1]) else None)

pressed = []
def press():
    "Ctrl-C, once"
    if pressed: return
    pressed.append(1); signal.raise_signal(signal.SIGINT)

@pytest.mark.parametrize('plant, steps', [(in_frozen, 0), (in_verifier, None), (in_backward, 0), (in_optimizer, 1), (in_sampling, 0)], ids=lambda x: getattr(x, '__name__', ''))
def test_ctrl_c_in_every_part(undisturbed, plant, steps):
    path, _ = undisturbed
    pressed.clear()
    trainer = fresh(); before = state(trainer)
    undo = plant(trainer)
    try:
        with pytest.raises(KeyboardInterrupt): trainer.train(STEPS)
    finally:
        if undo: undo()
    assert pressed
    if steps is not None: assert len(trainer.history.get('loss', [])) == steps       # in the optimizer it waits until the step is recorded
    check(trainer, path, before, plant.__name__)

def test_an_own_reference_is_put_back_too():
    trainer = fresh(); reference = fresh(seed=0).model.train()
    trainer = type(trainer)(trainer.model, trainer.tokenizer, trainer.make_task, trainer.verifier, k=6, reference=reference, max_new_tokens=3)
    before = state(trainer)
    hook = reference.register_forward_pre_hook(lambda m, a: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt): trainer.train(50)
    hook.remove()
    assert state(trainer) == before and reference.training

def test_an_error_leaves_no_step_half_done_either(undisturbed):
    trainer = fresh(); before = state(trainer)
    def fails(task, completion): raise RuntimeError('no')
    verifier, trainer.verifier = trainer.verifier, fails
    with pytest.raises(ValueError, match='RuntimeError: no'): trainer.train(1)
    trainer.verifier = verifier
    check(trainer, undisturbed[0], before, 'error')

def test_an_interrupt_in_the_callback_keeps_the_step(undisturbed):
    trainer = fresh(); before = state(trainer)
    with pytest.raises(KeyboardInterrupt): trainer.train(5, lambda t, m: signal.raise_signal(signal.SIGINT))
    assert len(trainer.history['loss']) == 1
    check(trainer, undisturbed[0], before, 'callback')

def test_training_in_another_thread_where_no_signal_comes(undisturbed):
    trainer = fresh(); t = threading.Thread(target=trainer.train, args=(STEPS,)); t.start(); t.join()
    assert parameters(trainer).equal(undisturbed[0][-1])

def test_somebody_elses_handler_is_asked_and_stays():
    "As in a run, where the first Ctrl-C is a request"
    asked, trainer = [], fresh()
    handler = lambda *_: asked.append(1)
    before = signal.signal(signal.SIGINT, handler)
    try:
        undo = in_optimizer(trainer); pressed.clear()
        trainer.train(2); undo()
        assert asked == [1] and signal.getsignal(signal.SIGINT) is handler and len(trainer.history['loss']) == 2
    finally: signal.signal(signal.SIGINT, before)
