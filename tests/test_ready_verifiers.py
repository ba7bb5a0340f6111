"""The ready-made verifiers meet what a policy may write: tables of cheats, round trips, noise, and a quarter of a megabyte of the same.

The tables are data: a completion, the score it must get, and why.
"""
import gc
import json
import re
import time
from fractions import Fraction
from random import Random
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2c_rl.tasks import Task, VerifierError, score
from g2c_rl.verifiers import (boxed, boxed_answer, exact_text, json_answer, json_keys, json_schema, last_number, math_equal, numbers_in,
                              python_tests, ready_made, regex_match, same_text, tagged, tagged_answer)

settings.register_profile('fixed', derandomize=True, deadline=None, max_examples=200, database=None)
settings.load_profile('fixed')

QUICK = {n: v for n,v in ready_made.items() if n not in ('math_equal', 'python_tests')} | {
    'json_keys': json_keys('a'), 'json_schema': json_schema(dict(type='object', required=['a'])), 'regex_match': regex_match('[a-z]+ [0-9]{1,3}')}
SUM, HALF, PI, BLUE = Task('What is 23 + 58?', 81), Task('Half of one?', '1/2'), Task('Pi?', 3.14), Task('Colour?', 'Sky Blue')

TABLE = [
    # ---- last_number: where it stands
    (last_number, SUM, '', 0, 'nothing'), (last_number, SUM, ' 81', 1, 'the answer'), (last_number, SUM, '71 or 81', 1, 'the last one counts'),
    (last_number, SUM, '81 or 71', 0, 'the last one counts'), (last_number, SUM, ' '.join(map(str, range(100))), 0, 'all numbers there are'),
    (last_number, SUM, '81\x00', 1, 'a control character is no digit'), (last_number, SUM, 'eighty-one', 0, 'words are no numbers'),
    # ---- last_number: what is glued to it
    (last_number, SUM, '-81', 0, 'the sign'), (last_number, SUM, '\u221281', 0, 'the typographic sign'), (last_number, SUM, '100-81', 1, 'a subtraction, not a sign'),
    (last_number, SUM, '81.', 1, 'a full stop'), (last_number, SUM, '81...', 1, 'an ellipsis'), (last_number, SUM, '81.0', 1, 'the same value'),
    (last_number, SUM, '81.5', 0, 'a decimal'), (last_number, SUM, '.81', 0, 'a decimal'), (last_number, SUM, '1.81', 0, 'a decimal'),
    (last_number, SUM, '1,081', 0, 'one number'), (last_number, SUM, '71,81', 1, 'a list'), (last_number, SUM, '0081', 1, 'leading zeros'),
    (last_number, SUM, '\u0668\u0661', 0, 'Arabic-Indic digits'), (last_number, SUM, '\uff18\uff11', 0, 'wide digits'), (last_number, SUM, '8\u00b9', 0, 'a superscript'),
    (last_number, SUM, '8\u200b1', 0, 'an invisible space between'), (last_number, SUM, '8 1', 0, 'a space between'), (last_number, SUM, '81' + '0'*5000, 0, 'very long'),
    (last_number, SUM, '0'*5000 + '81', 0, 'a thousand digits are no number that anyone asked for'), (last_number, SUM, '81 ' + '9'*5000, 0, 'and hide none'),
    (last_number, SUM, '8.1e1', 1, 'an exponent'), (last_number, SUM, '81e0', 1, 'an exponent'), (last_number, SUM, '81e1', 0, 'an exponent'),
    (last_number, SUM, '81e999999999', 0, 'an exponent to fill the memory'), (last_number, SUM, '0x51', 0, 'hexadecimal'), (last_number, SUM, '81%', 1, 'a unit'),
    (last_number, SUM, '81 on 1/2/2024', 0, 'a date is a number that equals nothing'), (last_number, SUM, '81/0', 0, 'a division by zero'),
    (last_number, SUM, '162/2', 1, 'a fraction'), (last_number, SUM, '80 2/2', 1, 'a mixed number'), (last_number, SUM, '-80 2/2', 0, 'a negative one'),
    (last_number, HALF, '1/2', 1, 'as it is written'), (last_number, HALF, '0.5', 1, 'as a decimal'), (last_number, HALF, '2', 0, 'its last integer'),
    (last_number, HALF, '7/2', 0, 'another fraction with this last integer'), (last_number, HALF, '1 1/2', 0, 'one and a half'), (last_number, HALF, '50%', 0, 'a unit, not a hundredth'),
    (last_number, HALF, '1/2/1', 0, 'a date'), (last_number, HALF, '-1/2', 0, 'the sign'), (last_number, HALF, '1/ 2', 1, 'a space'), (last_number, HALF, '1/2.5', 0, 'another one'),
    (last_number, PI, '3.14', 1, ''), (last_number, PI, '3.140', 1, 'the same value'), (last_number, PI, '3.14159', 0, 'another number'), (last_number, PI, '3,14', 0, 'a list'),
    (last_number, Task('', 'So 8*9 = 72. #### 72'), 'it is 72', 1, 'a worked reference'), (last_number, Task('', 'So 8*9 = 72. #### 72'), '8', 0, 'not its first number'),
    (last_number, Task('', 0), '-0', 1, 'zero has no sign'), (last_number, Task('', 0), '', 0, 'nothing is not zero'), (last_number, Task('', 1e-07), '0.0000001', 1, 'as Python writes it'),
    (last_number, Task('', 5000), '5e3', 1, 'an exponent'), (last_number, Task('', 5000), '5e3x', 0, 'a word'), (last_number, Task('', 3), '5e3x', 1, 'a number in it'),
    # ---- text
    (exact_text, BLUE, ' Sky Blue\n', 1, 'white space around it'), (exact_text, BLUE, 'sky blue', 0, 'capitals'), (exact_text, BLUE, 'Sky  Blue', 0, 'white space in it'),
    (exact_text, BLUE, '', 0, 'nothing'), (exact_text, BLUE, 'Sky Blue or red', 0, 'a list'), (exact_text, SUM, '81', 1, 'a number'), (exact_text, SUM, '81.0', 0, 'as text'),
    (same_text, BLUE, 'sky\n BLUE.', 1, 'capitals, white space, a full stop'), (same_text, BLUE, '"Sky Blue"', 1, 'quotes'), (same_text, BLUE, 'blue', 0, 'a part of it'),
    (same_text, BLUE, 'sky blue, red', 0, 'a list'), (same_text, BLUE, 'sky\u200bblue', 0, 'an invisible character'), (same_text, BLUE, 'What is sky blue', 0, 'an echo'),
    (same_text, Task('', 'caf\u00e9'), 'cafe\u0301', 1, 'two ways to write an accent'), (same_text, Task('', 'caf\u00e9'), 'cafe', 0, 'no accent'),
    # ---- marks
    (boxed_answer, SUM, r'\boxed{81}', 1, ''), (boxed_answer, SUM, '81', 0, 'no box'), (boxed_answer, SUM, r'\boxed{}', 0, 'an empty box'), (boxed_answer, SUM, r'\boxed{81', 0, 'cut'),
    (boxed_answer, SUM, r'\boxed{71} \boxed{81}', 0, 'a list of boxes'), (boxed_answer, SUM, r'\boxed{81} \boxed{81}', 1, 'twice the same'), (boxed_answer, SUM, r'\boxed{71, 81}', 0, 'a list in a box'),
    (boxed_answer, SUM, r'\boxed{71 or 81}', 0, 'a list in a box'), (boxed_answer, SUM, r'\boxed{\boxed{81}}', 0, 'a box in a box'), (boxed_answer, SUM, r'\boxed{81}\boxed{', 0, 'the second is cut'),
    (boxed_answer, SUM, r'\boxed {81}', 1, 'a space'), (boxed_answer, SUM, r'\boxed{$81$}', 1, 'dollars'), (boxed_answer, SUM, r'\\boxed{81}', 0, 'a line break and a word'),
    (boxed_answer, SUM, r'\boxed{-81}', 0, 'the sign'), (boxed_answer, SUM, r'\boxed{1,081}', 0, 'another number'), (boxed_answer, HALF, r'\boxed{0.5}', 1, 'the same value'),
    (boxed_answer, Task('', r'\frac{1}{2}'), r'so \boxed{\frac{1}{2}}.', 1, 'braces inside'), (boxed_answer, Task('', r'\{1\}'), r'\boxed{\{1\}}', 1, 'escaped braces inside'),
    (tagged_answer, SUM, '<answer>81</answer>', 1, ''), (tagged_answer, SUM, '<answer>81', 0, 'cut'), (tagged_answer, SUM, '<answer></answer>81', 0, 'empty'),
    (tagged_answer, SUM, '<answer>71</answer><answer>81</answer>', 0, 'a list of tags'), (tagged_answer, SUM, '<answer>71<answer>81</answer>', 0, 'one in another'),
    (tagged_answer, SUM, '<answer>71 81</answer>', 0, 'a list in a tag'), (tagged_answer, SUM, '<Answer>81</Answer>', 0, 'another tag'), (tagged_answer, SUM, '81</answer>', 0, 'no beginning'),
    (tagged_answer, BLUE, '<think>red?</think> <answer>\nsky blue.\n</answer>', 1, 'reasoning before it'), (tagged_answer, BLUE, '<answer>blue</answer>', 0, 'a part'),
    # ---- JSON
    (json_answer, Task('', dict(a=1)), '{"a": 1}', 1, ''), (json_answer, Task('', dict(a=1)), '{"a": 1} ok', 0, 'more'), (json_answer, Task('', dict(a=1)), '{"a": true}', 0, 'true is not 1'),
    (json_answer, Task('', dict(a=1)), '{"a": 2, "a": 1}', 0, 'a key twice'), (json_answer, Task('', dict(a=1)), '{"a": "1"}', 0, 'text'), (json_answer, Task('', dict(a=1)), "{'a': 1}", 0, 'Python'),
    (json_answer, Task('', dict(a=1)), '{"a": 1,}', 0, 'a comma'), (json_answer, Task('', dict(a=1)), '{"a": 1, "b": 2}', 0, 'another key'), (json_answer, Task('', dict(a=1)), '```json\n{"a": 1}\n```', 0, 'a fence'),
    (json_answer, Task('', dict(a=1)), '[{"a": 1}]', 0, 'in a list'), (json_answer, Task('', dict(a=1)), '{"a": 1', 0, 'cut'), (json_answer, Task('', 10**30), '1' + '0'*30, 1, 'exact'),
    (json_answer, Task('', 10**30), '1e30', 1, 'exact'), (json_answer, Task('', 10**30 + 1), '1e30', 0, 'exact, where floats are not'), (json_answer, Task('', .1), '0.1000000000000000055511151231257827', 0, 'exact'),
    (json_answer, Task('', -5), '5', 0, 'the sign'), (json_answer, Task('', -5), '-5', 1, ''), (json_answer, Task('', False), '0', 0, 'false is not 0'), (json_answer, Task('', None), 'null', 1, ''), (json_answer, Task('', None), '', 0, 'nothing is not null'),
    (json_answer, Task('', 'NaN'), 'NaN', 0, 'not JSON'), (json_answer, Task('', [1, 2]), '[2, 1]', 0, 'the order of a list'),
    (json_keys('a', 'b'), SUM, '{"b": null, "a": []}', 1, ''), (json_keys('a', 'b'), SUM, '{"a": 1}', 0, 'one is missing'), (json_keys('a'), SUM, '"a"', 0, 'text that has it'),
    (json_keys('a'), SUM, '["a"]', 0, 'a list that has it'), (json_keys('a'), SUM, '{"x": {"a": 1}}', 0, 'deeper'), (json_keys('a'), SUM, '{"a": 1}}', 0, 'a brace too many'),
    # ---- patterns
    (regex_match('[0-9]+'), SUM, '81', 1, ''), (regex_match('[0-9]+'), SUM, '81 or so', 0, 'only a beginning'), (regex_match('[0-9]+'), SUM, 'so 81', 0, 'only an end'),
    (regex_match('a|b'), SUM, 'ab', 0, 'alternatives of the whole'), (regex_match('[0-9]+$'), SUM, '81\nx', 0, 'another line'), (regex_match('a.b'), SUM, 'a\nb', 0, 'a dot is no line break'),
    (regex_match('a.b', re.S), SUM, 'a\nb', 1, 'unless asked for'), (regex_match(''), SUM, 'x', 0, 'an empty pattern'),
]

@pytest.mark.parametrize('verifier, task, completion, expected, why', TABLE, ids=lambda v: v.__name__ if callable(v) else repr(v)[:30] if isinstance(v, str) else '')
def test_table(verifier, task, completion, expected, why):
    assert verifier(task, completion) == expected, why

MATH = [(r'$\frac{1}{2}$', '0.5', 1), (r'$\frac{1}{2}$', r'so $x = \frac{2}{4}$', 1), (r'$\frac{1}{2}$', '2', 0), (r'$\frac{1}{2}$', '', 0), (r'$\frac{1}{2}$', '\ud800', 0),
        ('81', '81', 1), ('81', r'\boxed{71} \boxed{81}', 0), ('81', '71 or 81 or 91', 0), (81, r'\boxed{81}', 1), ('$x^2-1$', '$(x-1)(x+1)$', 1), ('$x^2-1$', '$x^2+1$', 0),
        ('$[0, 1]$', '$(0, 1)$', 0), ('$\\sqrt{8}$', '$2\\sqrt{2}$', 1), ('81', '('*5000, 0), ('81', '9'*5000, 0)]

@pytest.mark.parametrize('answer, completion, expected', MATH)
def test_mathematics(answer, completion, expected): assert math_equal(Task('?', answer), completion) == expected

def test_mathematics_in_a_thread():
    got = []
    thread = Thread(target=lambda: got.append(math_equal(HALF, '0.5')))
    thread.start(); thread.join()
    assert got == [1.]

ADD = Task('Write add(a, b).', 'assert add(2, 3) == 5\nassert add(-1, 1) == 0')
CHEATS = {
    'exits': 'raise SystemExit(0)', 'exits at once': 'import os; os._exit(0)', 'exits when called': 'import os\ndef add(a, b): os._exit(0)', 'says so': 'print("passed", 2, "asserts")',
    'equals everything': 'class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Same(7)',
    'claims to be equal': 'class Same:\n    def __eq__(self, other): return True\ndef add(a, b): return Same()', 'patches builtins': 'import builtins\nbuiltins.len = builtins.all = lambda *a: 1\ndef add(a, b): return 0',
    'replaces AssertionError': 'AssertionError = KeyError\ndef add(a, b): return 0', 'defines the counter': 'def _asserted(): pass\nadd = print',
    'answers for the judge': 'import os\nfor fd in range(64):\n    try: os.write(fd, b\'["0", "passed", ""]\\n["value", 5]\\n\')\n    except OSError: pass\ndef add(a, b): return 0',
    'writes to what is its own': 'import sys\ndef add(a, b): sys.stdout.write("passed"); return 0', 'looks for the tests': 'import sys\nadd = lambda a, b: sys._getframe(3).f_locals["request"]',
    'registers for the end': 'import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0', 'hard-codes one': 'def add(a, b): return 5', 'returns nothing': 'def add(a, b): pass',
    'is not Python': 'To add a and b, use +.', 'is empty': '', 'is a surrogate': '\ud800', 'is deep': '('*5000, 'recurses': 'def add(a, b): return add(a, b)', 'raises': 'def add(a, b): raise AssertionError',
    'kills': 'import os, signal\ndef add(a, b): os.kill(os.getppid(), signal.SIGKILL)', 'eats': 'x = bytearray(10**10)\ndef add(a, b): return a + b', 'another name': 'def plus(a, b): return a + b',
    'floods': 'def add(a, b): return "x" * 20_000_000'}

@pytest.mark.parametrize('code', CHEATS.values(), ids=CHEATS)
def test_programs_that_cheat(code): assert python_tests(ADD, code) == 0

@pytest.mark.parametrize('tests, code, expected', [
    ('assert sorted(add([2], [1])) == [1, 2]', 'def add(a, b): return []\ndef sorted(x): return [1, 2]', 0), ('for x in add([], []): assert x', 'def add(a, b): return []', 0),
    ('assert add([1], (2,)) == [1]', 'def add(a, b): return a', 1), ('assert add([1], 2) == (1,)', 'def add(a, b): return a', 0), ('def test_it(): assert add(1, 2) == 4', 'def add(a, b): return 3', 0),
    ('try: add(1, 2)\nexcept BaseException: pass\nassert True', 'import os\ndef add(a, b): os._exit(0)', 0), ('import sys\nsys.exit(0)\nassert add(1, 2) == 3', 'def add(a, b): return 3', 0),
    ('def same(a, b): assert a == b\nsame(add(1, 2), 3)', 'def same(a, b): pass\ndef add(a, b): return 4', 0), ('assert add(float("inf"), 1) == float("inf")', 'def add(a, b): return a + b', 1)])
def test_tests_of_many_kinds(tests, code, expected): assert python_tests(Task('', tests), code) == expected

def test_programs_that_wait():
    assert [python_tests(ADD, code, seconds=.5) for code in ('while True: pass', 'import time\ndef add(a, b): time.sleep(60)', 'x = 9**9**9')] == [0.]*3

def test_programs_that_work():
    for code in ('def add(a, b): return a + b', 'add = lambda a, b: a + b', 'from operator import add', 'class A:\n    def __call__(self, a, b): return a + b\nadd = A()',
                 'print("hello")\ndef add(a, b):\n    print(a)\n    return a + b', '```python\ndef add(a, b): return a - b\n```\nNo:\n```\ndef add(a, b): return a + b\n```'):
        assert python_tests(ADD, code) == 1, code

def test_a_reference_that_cannot_be_checked_is_an_error():
    for verifier,answer in [(last_number, 'many'), (last_number, '1/2/2024'), (exact_text, ''), (same_text, '?'), (boxed_answer, None), (tagged_answer, [81]), (math_equal, 'blue'),
                            (python_tests, 'x = 1'), (python_tests, None), (json_answer, float('nan'))]:
        with pytest.raises(VerifierError, match=verifier.__name__): score(verifier, Task('?', answer), '81')

# ---------- round trips

@given(st.fractions(max_denominator=10**6), st.sampled_from(['{}', 'so {}.', '= {}', '({})', 'it is {}, yes']))
def test_any_fraction_is_read_back(x, form): assert [*numbers_in(form.format(x))] == [x]

@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-10**9, max_value=10**9), st.sampled_from(['{}', '{:,}', '{:e}', '{:+}']))
def test_any_decimal_is_read_back(x, form): assert [*numbers_in(form.format(x))] == [Fraction(x)]

@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_float_is_read_back(x): assert last_number(Task('', x), f'so {x}') == 1 and last_number(Task('', x), f'{x} 1234.5') == (x == 1234.5)

balanced = st.recursive(st.text('ab81 \n', max_size=4), lambda inner: st.lists(inner.map('{{{}}}'.format) | inner, max_size=3).map(''.join), max_leaves=8)

@given(st.lists(balanced, max_size=4), st.sampled_from(['', ' or ', '{', '}{']))
def test_any_box_is_opened(contents, between):
    assert [*boxed(between.join(f'\\boxed{{{c}}}' for c in contents))] == contents

@given(st.lists(st.text(), max_size=4))
def test_any_tag_is_opened(contents):
    contents = [c for c in contents if '<' not in c]
    assert [*tagged(''.join(f'<answer>{c}</answer>' for c in contents))] == contents

values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)

@given(values, values)
def test_any_json_equals_itself(a, b):
    assert json_answer(Task('', a), json.dumps(a)) == json_answer(Task('', a), json.dumps(a, indent=2, ensure_ascii=False)) == 1
    assert json_answer(Task('', a), json.dumps(a) + ' x') == 0
    if repr(a) != repr(b) and a != b: assert json_answer(Task('', a), json.dumps(b)) == 0

# ---------- total and linear

crumbs = st.lists(st.sampled_from(['81', '1/2', '\\boxed{', '{', '}', '\\', '<answer>', '</answer>', '{"a":', '"', '[', ']', '.', ',', ' ', 'e', '-', '/', '\u0668', '\ud800', '\x00', '$', '\n']), max_size=30)

@given(crumbs.map(''.join) | st.text())
def test_any_text_is_scored(completion):
    for name,verifier in QUICK.items():
        value = verifier(SUM, completion)
        assert type(value) is float and value in (0., 1.) and verifier(SUM, completion) == value, name

def test_random_bytes():
    rng, seen = Random(0), set()
    for _ in range(5000):
        completion = rng.randbytes(rng.randrange(60)).decode('utf-8', 'surrogateescape')
        seen |= {verifier(SUM, completion) for verifier in QUICK.values()}
    assert seen <= {0., 1.}

BAITS = ['9', '1,', '1.', '.', '/', '1/', '1 ', '1 1/2 ', '1e', '1e5', '-', '81 ', '1 /', '\\boxed{', '{', '}', '\\', '\\boxed ', '<answer>', '[', ' [', '"', '\\"', '"a":', '\ud800', '$', "'", '\n', 'a']

@pytest.mark.parametrize('bait', BAITS, ids=repr)
def test_linear_time(bait):
    def seconds(verifier, n):
        gc.disable()
        start = time.process_time(); verifier(SUM, bait*(n//len(bait)))
        gc.enable()
        return time.process_time() - start
    for name,verifier in QUICK.items():
        for attempt in range(4):                # linear is 10, quadratic 100; a busy machine gets another chance
            ratio = seconds(verifier, 250_000) / max(min(seconds(verifier, 25_000) for _ in range(2)), 1e-3)
            if ratio < 40: break
        assert ratio < 40, f'{name}: ten times the text takes {ratio:.0f} times as long'
