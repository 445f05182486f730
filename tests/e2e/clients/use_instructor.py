"""instructor: every mode that it has for an OpenAI-compatible server, whole and streamed."""

import instructor
import openai
from asked import CITIES, JSON_MODEL, KEY, MODEL, TEXT, URL, WORDS
from forms import Weather, Words

FORCED = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
PROMPTED = (instructor.Mode.JSON, instructor.Mode.MD_JSON)  # the model has to know the form
ASKED = {"messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_retries": 0}


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), mode=mode)


for mode in FORCED:
    made = client(mode)
    assert made.chat.completions.create(model=MODEL, response_model=Weather, **ASKED).city in CITIES, mode
    last = list(made.chat.completions.create_partial(model=MODEL, response_model=Weather, **ASKED))[-1]
    assert last.city in CITIES, mode
for mode in PROMPTED:
    answer = client(mode).chat.completions.create(model=JSON_MODEL, response_model=Words, **ASKED)
    assert answer.words[:6] == WORDS[:6], mode  # the prompt of MD_JSON goes on after TEXT
responses = client(instructor.Mode.RESPONSES_TOOLS)
answer = responses.responses.create(model=MODEL, input=TEXT, response_model=Weather, max_retries=0)
assert answer.city in CITIES
