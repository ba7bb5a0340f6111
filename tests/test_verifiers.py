"""Verifiers meet what a half-trained policy may write: tables of traps, random bytes, a megabyte of the same, and other implementations.

The tables are data: a completion, the scores that the contract asks for, and why.
"""
import gc
import json
import time
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from g2c_rl.tasks import (Task, VerifierError, integers_in, score, verify_arithmetic, verify_arithmetic_sloppy, verify_format,
                          verify_format_content)

settings.register_profile('fixed', derandomize=True, deadline=None, max_examples=400, database=None)
settings.load_profile('fixed')

PREFIX = '{"answer":'
SUM = Task('What is 23 + 58? Options: 81 or 71. Answer with the number:', 81, options=(81, 71))
COLOR = Task('The lamp is blue. What color is the lamp? Reply in JSON. ' + PREFIX, 'blue', prefix=PREFIX)
COUNT = Task('The king has 7 hats. How many hats does the king have? Reply in JSON. ' + PREFIX, 7, prefix=PREFIX)
LINEAR = [(verify_arithmetic, SUM), (verify_arithmetic_sloppy, SUM), (verify_format, COLOR), (verify_format_content, COLOR),
          (verify_format_content, COUNT)]

# completion, verify_arithmetic, verify_arithmetic_sloppy, why; the answer is 81
NUMBERS = [
    # ---- where it stands
    ('', 0, 0, 'nothing was written'),
    (' ', 0, 0, 'a space is nothing'),
    (' 81', 1, 1, 'the answer'),
    ('81', 1, 1, 'the space is not part of it'),
    (' 71', 0, 0, 'the other option'),
    (' 71 or 81', 1, 1, 'the last integer counts'),
    (' 81 or 71', 0, 1, 'the last integer counts; anywhere is what the sloppy one asks'),
    ('81 81', 1, 1, 'twice is no mistake'),
    ('81 71 81', 1, 1, 'the last one'),
    ('1 2 3 81 4', 0, 1, 'a list of everything'),
    (' '.join(map(str, range(100))), 0, 1, 'all numbers there are'),
    ('23+58=81', 1, 1, 'working it out is allowed'),
    ('81=23+58', 0, 1, 'the last integer is 58'),
    ('81\n\n71', 0, 1, 'on another line'),
    ('81/1', 0, 1, 'a quotient is two integers'),
    ('81: 23 + 58', 0, 1, 'the question repeated after the answer'),
    # ---- what is glued to it
    ('81.', 1, 1, 'a full stop is not a decimal point'),
    ('81!', 1, 1, 'punctuation'),
    ('81?', 1, 1, 'punctuation'),
    ('(81)', 1, 1, 'brackets'),
    ('[81]', 1, 1, 'brackets'),
    ('"81"', 1, 1, 'quotes'),
    ('**81**', 1, 1, 'emphasis'),
    ('$81', 1, 1, 'a currency'),
    ('81%', 1, 1, 'a unit'),
    ('81st', 1, 1, 'letters behind it'),
    ('x81', 1, 1, 'letters before it'),
    ('x=81', 1, 1, 'an equation'),
    ('5x81', 1, 1, 'a product'),
    ('_81_', 1, 1, 'underscores'),
    ('#81;', 1, 1, 'signs'),
    ('\x0081\x00', 1, 1, 'null characters'),
    ('\ud800 81', 1, 1, 'a lone surrogate'),
    ('81\udfff', 1, 1, 'a lone surrogate, glued'),
    ('\N{PILE OF POO}81', 1, 1, 'beyond the basic plane'),
    ('811', 0, 0, 'another number'),
    ('181', 0, 0, 'another number'),
    ('8 1', 0, 0, 'two numbers'),
    ('8\n1', 0, 0, 'two numbers'),
    ('8\N{ZERO WIDTH SPACE}1', 0, 0, 'two numbers, though one cannot see it'),
    ('8_1', 0, 0, 'two numbers'),
    ('8-1', 0, 0, 'a difference'),
    ('eighty-one', 0, 0, 'words'),
    ('LXXXI', 0, 0, 'Roman'),
    ('0x51', 0, 0, 'hexadecimal'),
    ('8.1e1', 0, 0, 'a decimal, and a 1'),
    ('81e0', 0, 1, 'not read as a power of ten: 81, and a 0'),
    ('9**9**9', 0, 0, 'never evaluated'),
    ('factorial(99999999)', 0, 0, 'never evaluated'),
    ("__import__('os').abort()", 0, 0, 'never evaluated'),
    # ---- signs
    ('+81', 1, 1, 'plus'),
    ('-81', 0, 0, 'minus'),
    ('\N{MINUS SIGN}81', 0, 0, 'the typographic minus'),
    (' -81.', 0, 0, 'minus, and a full stop'),
    ('= -81', 0, 0, 'minus after an equals sign'),
    ('(-81)', 0, 0, 'minus in brackets'),
    ('--81', 0, 0, 'a sign after a sign'),
    ('71 -81', 0, 0, 'a sign after a space'),
    ('-081', 0, 0, 'minus, and a leading zero'),
    ('-81 81', 1, 1, 'the last one has no sign'),
    ('81 -81', 0, 1, 'the last one has'),
    ('71-81', 1, 1, 'glued to a digit it subtracts'),
    ('x-81', 1, 1, 'glued to a letter it joins'),
    ('é-81', 1, 1, 'any letter'),
    ('- 81', 1, 1, 'a bullet: the space parts them'),
    ('71 - 81', 1, 1, 'spaces on both sides'),
    ('\N{EN DASH}81', 1, 1, 'a dash is no sign'),
    ('\N{HYPHEN}81', 1, 1, 'a hyphen is no sign'),
    ('81-', 1, 1, 'behind the number it is no sign'),
    ('+ 81', 1, 1, 'plus and a space'),
    # ---- decimals are one number, and no integer
    ('81.5', 0, 0, 'a decimal'),
    ('81.0', 0, 0, 'a decimal, though its value is whole'),
    ('5.81', 0, 0, 'the digits behind the point are not a number'),
    ('0.81', 0, 0, 'the digits behind the point are not a number'),
    ('.81', 0, 0, 'no digit before the point'),
    ('-.81', 0, 0, 'no digit before the point, and a sign'),
    (' .81', 0, 0, 'a point after a space'),
    ('1.2.81', 0, 0, 'a version'),
    ('71.81.', 0, 0, 'a decimal, and a full stop'),
    ('81 81.5', 1, 1, 'decimals are passed over: the last integer is 81'),
    ('81.5 81', 1, 1, 'the last integer is 81'),
    ('81..', 1, 1, 'dots'),
    ('wait...81', 1, 1, 'an ellipsis is not a decimal point'),
    ('x.81', 1, 1, 'glued to a letter it is a full stop'),
    ('81..71', 0, 1, 'a range'),
    # ---- commas
    ('1,081', 0, 0, 'thousands: one number'),
    ('81,000', 0, 0, 'thousands: one number'),
    ('1,000,081', 0, 0, 'thousands twice'),
    ('-1,081', 0, 0, 'thousands and a sign'),
    ('1,081.5', 0, 0, 'thousands and decimals'),
    ('81,', 1, 1, 'a comma behind it'),
    (',81', 1, 1, 'a comma before it'),
    ('71,81', 1, 1, 'a list: groups have three digits'),
    ('81,71', 0, 1, 'a list'),
    ('7,81', 1, 1, 'a list'),
    ('7, 81', 1, 1, 'a list'),
    ('81,5', 0, 1, 'a list'),
    ('12,34,81', 1, 1, 'a list: groups of two are no thousands'),
    ('1,0810', 0, 0, 'a list: groups of four are no thousands'),
    ('1234,081', 1, 1, 'a list: four digits are no first group'),
    ('0,081', 1, 1, 'thousands, and leading zeros'),
    # ---- zeros and size
    ('081', 1, 1, 'leading zeros are allowed'),
    ('+0081', 1, 1, 'leading zeros and a sign'),
    ('0'*10_000 + '81', 1, 1, 'very many leading zeros'),
    ('81' + '0'*10_000, 0, 0, 'a very long number'),
    ('9'*10_000, 0, 0, 'longer than Python reads'),
    ('9'*10_000 + ' 81', 1, 1, 'the last one is short'),
    ('81 ' + '9'*10_000, 0, 1, 'the first one is short'),
    ('1,'*10_000 + '81', 1, 1, 'a very long list'),
    ('81,'*10_000, 1, 1, 'a very long list of answers'),
    ('1.'*10_000 + '81', 0, 0, 'a very long version'),
    ('-'*10_000 + '81', 0, 0, 'the last sign counts'),
    # ---- digits of others
    ('\u0668\u0661', 0, 0, 'Arabic-Indic digits'),
    ('\uff18\uff11', 0, 0, 'full-width digits'),
    ('\U0001d7d6\U0001d7cf', 0, 0, 'mathematical bold digits'),
    ('8\u0661', 0, 0, 'half and half'),
    ('\u00b2\u2079', 0, 0, 'superscripts'),
    ('81\u00b2', 1, 1, 'a superscript is not a digit'),
    ('\u066881', 1, 1, 'a foreign digit is a letter to us'),
    ('\u2468 81', 1, 1, 'a circled number'),
]

# completion, verify_format, verify_format_content (for "blue"), why; `{"answer":` stands before it
OBJECTS = [
    # ---- the object
    (' "blue"}', 1, 1, 'as asked'),
    ('"blue"}', 1, 1, 'no space'),
    (' \t\r\n"blue"\n}', 1, 1, 'all of the white space of JSON'),
    (' "blue"} ', 1, 1, 'space behind it'),
    (' "blue"} and so on', 1, 1, 'text behind it is ignored'),
    (' "blue"}}', 1, 1, 'even a brace'),
    (' "blue"} {"answer": "red"}', 1, 1, 'the first object counts'),
    (' "red"} {"answer": "blue"}', 1, 0, 'the first object counts'),
    (' "blue", "why": "it says so"}', 1, 1, 'other keys are allowed'),
    (' "red", "color": "blue"}', 1, 0, 'the answer is under its key'),
    (' "red", "answer": "blue"}', 1, 1, 'of two equal keys the last counts, as in most readers'),
    (' "blue", "answer": "red"}', 1, 0, 'of two equal keys the last counts, as in most readers'),
    (' "blue", "a": {"answer": "red"}}', 1, 1, 'an inner key is another key'),
    ('', 0, 0, 'nothing was written'),
    (' ', 0, 0, 'nothing was written'),
    ('}', 0, 0, 'no value'),
    (' }', 0, 0, 'no value'),
    (' "blue"', 0, 0, 'not closed'),
    (' "blue}', 0, 0, 'the quote is not closed'),
    (' blue}', 0, 0, 'no quotes'),
    (" 'blue'}", 0, 0, 'single quotes'),
    (' \u201cblue\u201d}', 0, 0, 'typographic quotes'),
    (' `blue`}', 0, 0, 'backticks'),
    (' "blue"]', 0, 0, 'another bracket'),
    (' "blue")', 0, 0, 'another bracket'),
    (' "blue" "red"}', 0, 0, 'no comma'),
    (' "blue",}', 0, 0, 'a comma too many'),
    (' ,"blue"}', 0, 0, 'a comma too many'),
    (' "blue", "why"}', 0, 0, 'a key without value'),
    (' "blue", why: 1}', 0, 0, 'a key without quotes'),
    (' "blue", 1: 2}', 0, 0, 'a number as a key'),
    (' "blue"; "b": 1}', 0, 0, 'a semicolon'),
    (': "blue"}', 0, 0, 'a colon too many'),
    (' = "blue"}', 0, 0, 'not a colon'),
    ('{"answer": "blue"}', 0, 0, 'begun anew, and not closed twice'),
    ('{"answer": "blue"}}', 1, 0, 'begun anew: the answer is an object'),
    (' "blue" // why\n}', 0, 0, 'comments are not JSON'),
    (' /* why */ "blue"}', 0, 0, 'comments are not JSON'),
    (' \N{NO-BREAK SPACE}"blue"}', 0, 0, 'white space of others'),
    (' \u2028"blue"}', 0, 0, 'white space of others'),
    (' \x0c"blue"}', 0, 0, 'a form feed is no white space of JSON'),
    ('\ufeff"blue"}', 0, 0, 'a byte order mark in the middle'),
    ('\x00"blue"}', 0, 0, 'a null character'),
    # ---- strings
    (' ""}', 1, 0, 'empty'),
    (' "green"}', 1, 0, 'format is not content'),
    (' "Blue"}', 1, 0, 'capitals matter'),
    (' " blue"}', 1, 0, 'spaces matter'),
    (' "blue."}', 1, 0, 'a full stop matters'),
    (' "bl\\u0075e"}', 1, 1, 'an escape is the character it stands for'),
    (' "\\"blue\\""}', 1, 0, 'quotes inside'),
    (' "\\\\ \\/ \\b \\f \\n \\r \\t"}', 1, 0, 'all escapes'),
    (' "\\x41"}', 0, 0, 'an escape that JSON does not know'),
    (" \"\\'\"}", 0, 0, 'an escape that JSON does not know'),
    (' "\\u12"}', 0, 0, 'an escape that is too short'),
    (' "\\u12g4"}', 0, 0, 'an escape that is not hexadecimal'),
    (' "\\u 123"}', 0, 0, 'a space in an escape'),
    (' "\\u+123"}', 0, 0, 'a sign in an escape'),
    (' "\\u0x12"}', 0, 0, 'a prefix in an escape'),
    (' "\\ud83d\\ude00"}', 1, 0, 'a pair of surrogates'),
    (' "\\ud800"}', 1, 0, 'half a pair: the grammar allows it'),
    (' "\ud800"}', 1, 0, 'a lone surrogate, not escaped'),
    (' "\\"}', 0, 0, 'the closing quote is escaped'),
    (' "a\nb"}', 0, 0, 'a bare line break'),
    (' "a\tb"}', 0, 0, 'a bare tab'),
    (' "a\x00b"}', 0, 0, 'a bare null'),
    (' "a\x1fb"}', 0, 0, 'the last control character'),
    (' "a\x7fb"}', 1, 0, 'DEL is none'),
    (' "a\u2028b"}', 1, 0, 'a line separator is none'),
    (' "\N{PILE OF POO}"}', 1, 0, 'beyond the basic plane'),
    (' "' + 'x'*100_000 + '"}', 1, 0, 'a long string'),
    # ---- numbers
    (' 7}', 1, 0, 'a number is an answer, the wrong one'),
    (' -7}', 1, 0, 'minus'),
    (' -0}', 1, 0, 'minus zero'),
    (' 7.5e-3}', 1, 0, 'all of it'),
    (' 7E+3}', 1, 0, 'a capital E'),
    (' 1e999}', 1, 0, 'beyond a float'),
    (' ' + '9'*10_000 + '}', 1, 0, 'longer than Python reads'),
    (' 0.' + '9'*10_000 + '}', 1, 0, 'long behind the point'),
    (' +7}', 0, 0, 'plus'),
    (' 07}', 0, 0, 'a leading zero'),
    (' 7.}', 0, 0, 'no digit behind the point'),
    (' .7}', 0, 0, 'no digit before the point'),
    (' 7e}', 0, 0, 'no exponent'),
    (' -}', 0, 0, 'a sign alone'),
    (' - 7}', 0, 0, 'a space after the sign'),
    (' 0x7}', 0, 0, 'hexadecimal'),
    (' 1_000}', 0, 0, 'an underscore'),
    (' 1,000}', 0, 0, 'a comma starts the next key'),
    (' \u0667}', 0, 0, 'an Arabic-Indic digit'),
    (' \uff17}', 0, 0, 'a full-width digit'),
    (' NaN}', 0, 0, "Python's reader takes it, JSON does not"),
    (' Infinity}', 0, 0, "Python's reader takes it, JSON does not"),
    (' -Infinity}', 0, 0, "Python's reader takes it, JSON does not"),
    (' "blue", "x": NaN}', 0, 0, 'not even under another key'),
    (' [1, -Infinity]}', 0, 0, 'not even inside'),
    (' -NaN}', 0, 0, 'nobody takes it'),
    # ---- other values
    (' true}', 1, 0, 'a truth value'),
    (' null}', 1, 0, 'null is a value'),
    (' True}', 0, 0, "Python's spelling"),
    (' None}', 0, 0, "Python's spelling"),
    (' nul}', 0, 0, 'cut short'),
    (' undefined}', 0, 0, "JavaScript's"),
    (' []}', 1, 0, 'an empty list'),
    (' {}}', 1, 0, 'an empty object'),
    (' ["blue"]}', 1, 0, 'a list with the answer is not the answer'),
    (' {"blue": "blue"}}', 1, 0, 'an object with the answer is not the answer'),
    (' [1, 2,]}', 0, 0, 'a comma too many'),
    (' [1 2]}', 0, 0, 'a comma too few'),
    (' ["blue"}', 0, 0, 'brackets crossed'),
    # ---- depth and size
    ('['*99 + '1' + ']'*99 + '}', 1, 0, 'as deep as is allowed'),
    ('['*100 + '1' + ']'*100 + '}', 0, 0, 'one deeper'),
    ('{"a":'*99 + '1' + '}'*99 + '}', 1, 0, 'objects as deep as is allowed'),
    ('{"a":'*100 + '1' + '}'*100 + '}', 0, 0, 'one deeper'),
    (' "blue", "x": ' + '['*100 + '1' + ']'*100 + '}', 0, 0, 'under another key'),
    ('['*100_000, 0, 0, 'never closed'),
    ('['*100_000 + ']'*100_000 + '}', 0, 0, 'closed'),
    ('{"answer":'*100_000, 0, 0, 'begun again and again'),
    ('[' + '[],'*10_000 + '[]]}', 1, 0, 'wide is not deep'),
    (' "blue"' + ' '*100_000 + '}', 1, 1, 'much white space'),
    (' "blue"}' + '['*100_000, 1, 1, 'what comes behind it is not read'),
]

# completion, verify_format_content, why; the answer is the number 7
COUNTS = [
    (' 7}', 1, 'a number'), (' 7 }', 1, 'space behind it'), ('7}', 1, 'no space'), (' 7, "n": 8}', 1, 'another key'), (' "7"}', 0, 'a string'),
    (' 7.0}', 0, 'a decimal'), (' 7e0}', 0, 'a power of ten'), (' -7}', 0, 'minus'), (' 77}', 0, 'another number'), (' 07}', 0, 'not JSON'),
    (' [7]}', 0, 'a list'), (' true}', 0, 'a truth value'), (' null}', 0, 'null'), (' {"7": 7}}', 0, 'an object'), (' 7', 0, 'not closed'),
    (' "seven"}', 0, 'a word'), (' ' + '7'*10_000 + '}', 0, 'longer than Python reads')]


def label(completion): return repr(completion if len(completion) < 30 else f'{completion[:27]}...')


def test_tables_are_large():
    for table in (NUMBERS, OBJECTS):
        assert len({row[0] for row in table}) == len(table) >= 80


@pytest.mark.parametrize('completion,last,anywhere,why', NUMBERS, ids=map(label, [row[0] for row in NUMBERS]))
def test_numbers(completion, last, anywhere, why):
    assert (verify_arithmetic(SUM, completion), verify_arithmetic_sloppy(SUM, completion)) == (last, anywhere), why


@pytest.mark.parametrize('completion,form,content,why', OBJECTS, ids=map(label, [row[0] for row in OBJECTS]))
def test_objects(completion, form, content, why):
    assert (verify_format(COLOR, completion), verify_format_content(COLOR, completion)) == (form, content), why


@pytest.mark.parametrize('completion,content,why', COUNTS, ids=map(label, [row[0] for row in COUNTS]))
def test_counts(completion, content, why): assert verify_format_content(COUNT, completion) == content, why


def test_format_asks_for_an_object_with_the_key():
    bare = Task('Reply in JSON.', 'blue')
    for completion,expected in (('{"answer": "blue"}', 1), ('{"answer": 1} more', 1), ('{"Answer": 1}', 0), ('{}', 0), ('[{"answer": 1}]', 0), ('"answer"', 0),
                                ('{"a": {"answer": 1}}', 0), ('{"\\u0061nswer": 1}', 1), ('answer', 0), ('null', 0), ('', 0)):
        assert verify_format(bare, completion) == expected, completion


# ---------- the same contracts, written another way

DIGITS = '0123456789'


def integers_by_hand(text):
    "One character after another"
    found, i = [], 0
    while i < len(text):
        if text[i] not in DIGITS:
            i += 1
            continue
        start = i
        while i < len(text) and (text[i] in DIGITS or (text[i] in '.,' and text[i+1:i+2] in (*DIGITS,))): i += 1
        body, last, before = text[start:i], text[:start][-1:], text[:start][-2:-1]
        if '.' in body or (last == '.' and not (before.isalnum() or before in ('.', '_'))): continue
        parts = body.split(',')
        if len(parts) > 1 and len(parts[0]) <= 3 and all(len(p) == 3 for p in parts[1:]): parts = [''.join(parts)]
        minus = last in ('-', '\N{MINUS SIGN}') and not before.isalnum()
        values = [int(p) for p in parts]
        found += [str(-values[0] if minus else values[0]), *map(str, values[1:])]
    return found


class NotJSON(Exception): pass


def read_json(text, i=0):
    "A strict reader after RFC 8259: the value that starts at i, its depth, and where it ends; numbers stay text in a tuple"
    def skip(i):
        while text[i:i+1] in (*' \t\n\r',): i += 1
        return i
    i = skip(i)
    c = text[i:i+1]
    for word,value in (('true', True), ('false', False), ('null', None)):
        if text.startswith(word, i): return value, 0, i + len(word)
    if c == '"':
        out, i = '', i + 1
        while (c := text[i:i+1]) != '"':
            if c == '' or c < ' ': raise NotJSON
            if c == '\\':
                c, i = text[i+1:i+2], i + 1
                if c == 'u':
                    code = text[i+1:i+5]
                    if len(code) < 4 or set(code) - set('0123456789abcdefABCDEF'): raise NotJSON
                    c, i = chr(int(code, 16)), i + 4
                elif c in (*'"\\/bfnrt',): c = dict(zip('bfnrt', '\b\f\n\r\t')).get(c, c)
                else: raise NotJSON
            out, i = out + c, i + 1
        return out, 0, i + 1
    if c in (*'[{',):
        end, items, depth, i = ']}'[c == '{'], [], 0, skip(i + 1)
        while text[i:i+1] != end or items:
            if c == '{':
                key, _, i = read_json(text, i)
                i = skip(i)
                if not isinstance(key, str) or text[i:i+1] != ':': raise NotJSON
                i += 1
            value, inner, i = read_json(text, i)
            items.append((key, value) if c == '{' else value)
            depth, i = max(depth, inner), skip(i)
            if text[i:i+1] == end: break
            if text[i:i+1] != ',': raise NotJSON
            i += 1
        return (dict(items) if c == '{' else items), depth + 1, i + 1
    start = i
    def digits(i):
        if text[i:i+1] not in (*DIGITS,): raise NotJSON
        while text[i:i+1] in (*DIGITS,): i += 1
        return i
    if c == '-': i += 1
    i = i + 1 if text[i:i+1] == '0' else digits(i)
    for mark in ('.', 'eE'):        # a mark without its digits is not part of the number, and then not of anything
        if text[i:i+1] in (*mark,):
            i += 1
            if mark == 'eE' and text[i:i+1] in (*'+-',): i += 1
            i = digits(i)
    return (text[start:i],), 0, i


def format_by_hand(task, completion):
    "Scores for form and content"
    try: value, depth, _ = read_json(task.prefix + completion) if (task.prefix + completion)[:1] == '{' else (None, 0, 0)
    except NotJSON: return 0, 0
    if not isinstance(value, dict) or 'answer' not in value or depth > 100: return 0, 0
    return 1, int(value['answer'] == ((str(task.answer),) if isinstance(task.answer, int) else task.answer))


def test_the_tables_agree_with_the_other_way():
    for completion,last,anywhere,why in NUMBERS:
        if len(completion) > 5000 and '9'*5000 in completion + '0'*5000: continue     # `int` does not read these
        if '0'*5000 in completion: continue
        found = integers_by_hand(completion)
        assert (found[-1:] == ['81'], '81' in found) == (last, anywhere), why
    for completion,form,content,why in OBJECTS:
        if len(completion) < 5000: assert format_by_hand(COLOR, completion) == (form, content), why
    for completion,content,why in COUNTS: assert format_by_hand(COUNT, completion)[1] == content, why


numbery = st.text(alphabet='0012389..,,,+--\N{MINUS SIGN} _ax\u00e9\u0668\n()', max_size=30) | st.text(max_size=30)
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | st.sampled_from(['blue', 'red', '', '"', '\\', '\ud800', 'é\n']),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(['answer', 'a', '']), inner, max_size=3), max_leaves=8)


@st.composite
def nearly_json(draw):
    "What closes the object correctly, and then a few characters of it changed"
    more = draw(st.dictionaries(st.sampled_from(['answer', 'a', 'b"', '']), values, max_size=2))
    text = json.dumps({'answer': draw(values)} | more, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    text = text[text.index(':') + 1:] + draw(st.sampled_from(['', ' ', '}', ' and more', '{"answer": "blue"}']))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(['', *'{}[]",:\\ \n\t\x00.-+eE07nNuI\N{NO-BREAK SPACE}'])) + text[at + draw(st.integers(0, 2)):]
    return text


@given(numbery)
@example('1,081.5,81')
def test_integers_agree(text): assert [*integers_in(text)] == integers_by_hand(text)


@given(st.integers(), st.sampled_from(['{}', ' {}.', '= {}', '({})', 'so {}, yes', '{:+}', '\n{}\n']))
def test_any_integer_is_read_back(n, form): assert [*integers_in(form.format(n))] == [str(n)]


@given(st.integers(-10**12, 10**12))
def test_thousands_are_one_number(n): assert [*integers_in(f'{n:,}')] == [str(n)]


@given(st.floats(allow_nan=False, allow_infinity=False).map(lambda x: f'{x:.6f}'))
def test_decimals_are_no_integers(text): assert [*integers_in(text)] == []


@given(numbery, numbery)
def test_last_and_anywhere(a, b):
    last, anywhere = (lambda c: verify_arithmetic(SUM, c)), (lambda c: verify_arithmetic_sloppy(SUM, c))
    assert last(f'{a} 81') == 1 and last(f'{a} 82') == 0                    # whatever came before
    assert last(a) <= anywhere(a)                                           # the sloppy one is never stricter
    assert anywhere(f'{a} {b}') == max(anywhere(a), anywhere(b))            # and listing more never hurts it
    assert last(f'{a} {b}') == last(b if [*integers_in(b)] else a)


@given(nearly_json() | st.text(alphabet='{}[]":,\\ \n01-+.eEnulltrfasNI', max_size=25))
@example(' 1.}')
@example(' [1.e5]}')
@example(' "a", "answer": 7}')
def test_format_agrees(completion):
    for task in (COLOR, COUNT): assert (verify_format(task, completion), verify_format_content(task, completion)) == format_by_hand(task, completion)


@given(values, st.text())
def test_what_json_writes_passes(value, more):
    text = json.dumps({'answer': value})[len(PREFIX):]
    strict = 'NaN' not in text and 'Infinity' not in text
    assert verify_format(COLOR, text + more) == strict
    assert verify_format(COLOR, text[:-1]) == 0                             # without its last brace
    assert verify_format_content(COLOR, text) == (value == 'blue')


# ---------- total

def total(completion):
    for verifier,task in LINEAR:
        value = verifier(task, completion)
        assert type(value) is float and value in (0., 1.) and verifier(task, completion) == value, (verifier.__name__, completion)


@given(st.text())
def test_any_text_is_scored(completion): total(completion)


def test_a_hundred_thousand_random_byte_strings():
    rng, seen = Random(0), {0.: 0, 1.: 0}
    telling = b'0123456789 .,-+{}[]":\\8181\nblueNa}'
    for i in range(100_000):
        noise = rng.randbytes(rng.randrange(40)) if i % 2 else bytes(rng.choices(telling, k=rng.randrange(20)))
        completion = noise.decode('latin-1') if i % 4 < 2 else noise.decode('utf-8', 'surrogateescape')
        for verifier,task in LINEAR: seen[verifier(task, completion)] += 1       # a KeyError if it is neither
    assert seen[0.] + seen[1.] == 100_000*len(LINEAR) and seen[1.] > 1000


BAITS = ['9', '-', '1,', '1.', '1,000', '.', ',', '-1', '81 ', '0', '[', '{"answer":', '[],', '"', '\\', '\\u0041', '\ud800', ' ', '\n', 'x', '\u0668',
         '"a":1,', '1e']


@pytest.mark.parametrize('bait', BAITS, ids=repr)
def test_a_megabyte_takes_linear_time(bait):
    def seconds(f, text):
        gc.disable()                   # its full rounds look at everything that other tests have left
        start = time.process_time()
        f(text)
        gc.enable()
        return time.process_time() - start
    big, small = bait*(1_000_000//len(bait)), bait*(100_000//len(bait))
    for before in ('', ' "', ' [', ' "a"} '):
        for verifier,task in LINEAR[:4]:
            if before and verifier in (verify_arithmetic, verify_arithmetic_sloppy): continue
            judge = lambda text: verifier(task, text)
            for attempt in range(4):       # linear is 10, quadratic 100; a busy machine gets another chance
                ratio = seconds(judge, before + big) / max(min(seconds(judge, before + small) for _ in range(2)), 1e-3)
                if ratio < 40: break
            assert ratio < 40, f'{verifier.__name__}: ten times the text takes {ratio:.0f} times as long'


# ---------- score: the package's only way to call a verifier

def returns(value): return lambda task, completion: value


@pytest.mark.parametrize('value', [0, 1, 1., True, -2.5, Fraction(1, 2), torch.tensor(1.), np.float32(1), np.bool_(True), np.array(1.)], ids=repr)
def test_score_takes_finite_numbers(value):
    got = score(returns(value), SUM, ' 81')
    assert type(got) is float and got == float(value)


@pytest.mark.parametrize('value', [None, '1.0', b'1', [1.], (1., 2.), {}, 1j, float('nan'), float('inf'), -float('inf'), np.float64('nan'),
                                   torch.tensor(float('nan')), torch.tensor(1j), torch.ones(2), torch.ones(0), np.ones(2), 10**400, print,
                                   torch.Tensor], ids=lambda v: repr(v)[:30])
def test_score_refuses_the_rest(value):
    with pytest.raises(VerifierError) as e: score(returns(value), SUM, 'so it is 81')
    assert '23 + 58' in str(e.value) and 'so it is 81' in str(e.value)


@pytest.mark.parametrize('error', [ZeroDivisionError, RecursionError, KeyError, MemoryError, UnicodeDecodeError('utf-8', b'', 0, 1, 'bad'), StopIteration])
def test_score_shows_what_failed(error):
    def my_verifier(task, completion): raise error
    with pytest.raises(VerifierError, match='my_verifier') as e: score(my_verifier, SUM, 'so it is 81')
    assert '23 + 58' in str(e.value) and 'so it is 81' in str(e.value) and e.value.__cause__ is not None
    assert type(e.value.__cause__).__name__ in str(e.value)


def test_score_lets_an_interrupt_through():
    def stop(task, completion): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): score(stop, SUM, '')
    with pytest.raises(VerifierError, match='positional argument'): score(lambda completion: 1., SUM, '')
