"""Guards that local files change where the rows come from and nothing else: the same prompts and counts."""

import json
from functools import lru_cache
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager

from lingpt.common.errors import UserError
from lingpt.eval.suites import COMMONSENSE, RETRIEVAL
from lingpt.eval.tasks.benchmark import covered, load_tasks, local_tasks
from lingpt.eval.tasks.sources import benchmark_folder, official_questions, read_split, sources

STOCK = Path(lm_eval.tasks.__file__).parent
CASES = [("arc_easy", 0), ("arc_easy", 5), ("arc_challenge", 3), ("piqa", 0), ("mmlu", 5)]
pytestmark = pytest.mark.usefixtures("no_network")


def requests(tasks, limit=None):
    """Everything a model would be asked, by task."""
    for task in tasks.values():
        task.build_all_requests(limit=limit)
    return {name: [instance.args for instance in task.instances] for name, task in tasks.items()}


@lru_cache
def read(file):
    return [json.loads(line) for line in file.open(encoding="utf-8")]


def stock_tasks(name, num_fewshot, data, monkeypatch):
    """lm-eval's own task objects, with `datasets.load_dataset` answering from the rows as the hub would."""

    def load_dataset(path, name=None, **kwargs):
        splits = {
            "allenai/ai2_arc": {"train": "train", "test": "test"},
            "baber/piqa": {"validation": "valid"},
            "cais/mmlu": {"dev": "dev", "test": "test"},
        }[path]
        stem = {"ARC-Easy": "arc_easy", "ARC-Challenge": "arc_challenge"}.get(name, path.split("/")[1])
        found = {}
        for split, suffix in splits.items():
            rows = read(data / f"{stem}_{suffix}.jsonl")
            rows = [row for row in rows if row.get("subject", name) == name or stem != "mmlu"]
            found[split] = datasets.Dataset.from_list(rows)
        found.setdefault("train", datasets.Dataset.from_list(rows))  # PIQA's pool of examples, not drawn from
        return datasets.DatasetDict(found)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    folders = [STOCK / folder for folder in ("arc", "piqa", "mmlu/default")]
    tasks = TaskManager(include_defaults=False, include_path=folders).load(name)["tasks"]
    for task in tasks.values():
        task.set_config("num_fewshot", num_fewshot)
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    return tasks


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_fewshot"), CASES)
def test_prompts_are_the_stock_tasks(name, num_fewshot, eval_data, monkeypatch):
    """Byte for byte what lm-eval's own task builds from the same rows, examples and their order included."""
    found = requests(load_tasks(name, num_fewshot, eval_data)["tasks"])
    assert found == requests(stock_tasks(name, num_fewshot, eval_data, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_fewshot"), [("arc_easy", 0), ("arc_challenge", 5), ("piqa", 0), ("mmlu", 5)]
)
def test_prompts_of_the_real_data(name, num_fewshot, real_data, monkeypatch):
    """The same on the first documents of the real benchmarks."""
    data = real_data / "eval"
    found = requests(load_tasks(name, num_fewshot, data)["tasks"], limit=3)
    assert found == requests(stock_tasks(name, num_fewshot, data, monkeypatch), limit=3)


def test_prompts_by_heart(real_data):
    """The first ARC-Easy and MMLU requests, written out: a change in lm-eval or in the files is seen."""
    arc = load_tasks("arc_easy", 0, real_data / "eval")["tasks"]["arc_easy"]
    arc.build_all_requests(limit=1)
    question = "Which statement best explains why photosynthesis is the foundation of most food webs?"
    assert arc.instances[0].args == (
        f"Question: {question}\nAnswer:",
        " Sunlight is the source of energy for nearly all ecosystems.",
    )
    mmlu = load_tasks("mmlu_abstract_algebra", 0, real_data / "eval")["tasks"]["mmlu_abstract_algebra"]
    mmlu.build_all_requests(limit=1)
    assert mmlu.instances[1].args == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        "Find the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q.\n"
        "A. 0\nB. 4\nC. 2\nD. 6\nAnswer:",
        " B",
    )


@pytest.mark.parametrize(
    ("name", "count"), [("arc_easy", 2376), ("arc_challenge", 1172), ("piqa", 1838), ("mmlu", 14042)]
)
def test_official_counts(name, count, real_data):
    """Every document of the benchmark is there, in MMLU's case under 57 subjects."""
    tasks = load_tasks(name, 0, real_data / "eval")["tasks"]
    assert sum(len(task.eval_docs) for task in tasks.values()) == count
    assert len(tasks) == (57 if name == "mmlu" else 1)
    assert not any(task.odd_rows for task in tasks.values())


def test_an_incomplete_file_is_known(eval_data):
    """A file shorter than the official split is usable, its scores are marked; one of examples as well."""
    rows = {"arc_easy_test.jsonl": (9, 2376), "arc_easy_train.jsonl": (12, 2251)}
    assert load_tasks("arc_easy", 2, eval_data)["tasks"]["arc_easy"].odd_rows == rows


def test_too_few_examples_are_one_line(eval_data):
    """Guards: an AssertionError of lm-eval's sampler, and no further task scored."""
    for task, few, message in (("arc_easy", 13, "train.* has 12 rows"), ("mmlu", 6, "dev.* has 5 rows")):
        with pytest.raises(UserError, match=f"{message} for .*: too few for {few} examples"):
            load_tasks(task, few, eval_data)


def test_requests_are_built_once_for_all_checkpoints(eval_data):
    """The second checkpoint gets the same questions, none of the first one's answers, at no cost."""
    task = load_tasks("arc_easy", 5, eval_data)["tasks"]["arc_easy"]
    first = requests({"arc_easy": task})
    task.instances[0].resps.append("the first checkpoint's")
    again = load_tasks("arc_easy", 5, eval_data)["tasks"]["arc_easy"]
    assert again is task
    instances = task.instances
    assert requests({"arc_easy": again}) == first
    assert task.instances is instances and not instances[0].resps
    shorter = requests({"arc_easy": again}, limit=2)  # another limit: built again, from the same seed
    assert shorter["arc_easy"] == first["arc_easy"][:8]


def test_missing_files_are_named(eval_data, tmp_path):
    """The split evaluated, and with shots the one examples come from: PIQA here is zero-shot only."""
    with pytest.raises(UserError, match=r"piqa_train\.jsonl \(the train split\)"):
        load_tasks("piqa", 5, eval_data)
    line = rf"{tmp_path} has no arc_easy_test\.jsonl \(the test split\): put it there, or leave out --data"
    with pytest.raises(UserError, match=line):
        load_tasks("arc_easy", 0, tmp_path)
    with pytest.raises(UserError, match=r"mmlu_test.jsonl has no row whose subject is 'alchemy'"):
        read_split(eval_data, sources()["cais/mmlu"], "test", "alchemy")
    with pytest.raises(UserError, match="no folder"):
        load_tasks("arc_easy", 0, tmp_path / "nowhere")


def test_bad_lines_are_named(tmp_path):
    """Not JSON, a field missing, nothing at all: file and line, and how to tell."""
    file = tmp_path / "piqa_valid.jsonl"
    good = json.dumps({"goal": "g", "sol1": "a", "sol2": "b", "label": 0})
    for text, message in [
        (good + '\n{"goal": "cut o', r"piqa_valid\.jsonl:2: not JSON"),
        (good + '\n\n{"goal": "g", "sol1": "a", "label": 0}\n', r"piqa_valid\.jsonl:3: no 'sol2'"),
        (json.dumps(json.loads(good) | {"goal": "\ud83d"}), "jsonl:1: has half a surrogate pair"),
        (good + "\n\udcff\udcfe\n", r"piqa_valid\.jsonl:2: not JSON"),
        ("\n", "is empty"),
    ]:
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match=message):
            load_tasks("piqa", 0, tmp_path)


PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 0}
ARC = {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}
MMLU = {"question": "q", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": 0}
SIQA = {"question": "q r", "choices": ["a", "b", "c"], "label": 0}
WINOGRANDE = {"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"}
WRONG = [
    ("piqa_valid", "piqa", PIQA, {"label": 7}, "'label' is 7; it must be 0 or 1"),
    ("piqa_valid", "piqa", PIQA, {"label": True}, "'label' is true"),
    ("piqa_valid", "piqa", PIQA, {"label": "0"}, "'label' is \"0\""),
    ("piqa_valid", "piqa", PIQA, {"goal": ["g"]}, "'goal' is .*; it must be a string"),
    ("arc_easy_test", "arc_easy", ARC, {"choices": ["a", "b"]}, "'choices' is .*; it must be {\"text\""),
    ("arc_easy_test", "arc_easy", ARC, {"choices": {"text": ["a", "b"], "label": ["A"]}}, "'choices' is"),
    ("arc_easy_test", "arc_easy", ARC, {"answerKey": "C"}, "it must be one of the choices' labels"),
    ("arc_easy_test", "arc_easy", ARC, {"answerKey": {}}, "it must be one of the choices' labels"),
    ("mmlu_test", "mmlu_anatomy", MMLU, {"answer": 4}, "'answer' is 4; it must be the number of a choice"),
    ("mmlu_test", "mmlu_anatomy", MMLU, {"answer": -1}, "'answer' is -1"),
    ("mmlu_test", "mmlu_anatomy", MMLU, {"choices": "ab"}, "'choices' is .*; it must be a list of four"),
    ("mmlu_test", "mmlu_anatomy", MMLU, {"choices": ["a", "b", "c"]}, "it must be a list of four strings"),
    ("social_iqa_validation", "social_iqa", SIQA, {"choices": ["a", "b"]}, "it must be a list of three"),
    (
        "winogrande_validation",
        "winogrande",
        WINOGRANDE,
        {"sentence": "a X b"},
        "it must be a string with a _",
    ),
    ("lambada_openai_test", "lambada_openai", {"text": "a b"}, {"text": ""}, "a string of two or more words"),
]


@pytest.mark.parametrize(("name", "task", "row", "change", "message"), WRONG)
def test_a_row_of_the_wrong_types_is_named(tmp_path, name, task, row, change, message):
    """Guards: a label that no answer has, scored as wrong; a traceback of a template engine."""
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | change) + "\n")
    with pytest.raises(UserError, match=rf"{name}\.jsonl:2: .*{message}") as error:
        load_tasks(task, 0, tmp_path)
    assert "\n" not in str(error.value)


def test_what_a_task_does_not_read_is_ignored(tmp_path):
    """Guards: tracebacks of another field, whose types differ by row, and of a link to nowhere beside it."""
    rows = [PIQA | {"id": 1, "note": {}}, PIQA | {"id": "x2", "note": [2**70]}, PIQA]
    (tmp_path / "piqa_valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.jsonl").symlink_to(tmp_path / "nowhere")
    assert len(load_tasks("piqa", 0, tmp_path)["tasks"]["piqa"].eval_docs) == 3


def test_the_folder_that_is_given_precedes_the_environments(monkeypatch):
    """An empty EVAL_DATA is none."""
    for given, variable, folder in (("a", "b", Path("a")), (None, "b", Path("b")), (None, "", None)):
        monkeypatch.setenv("EVAL_DATA", variable)
        assert benchmark_folder(given) == folder


def test_unknown_tasks(eval_data):
    """The nearest name, and what has no local files. Guards: a tag was scored, and its scores not shown."""
    with pytest.raises(UserError, match=r"'ai2_arc' has no score of its own: .*, arc_challenge arc_easy"):
        load_tasks("ai2_arc", 0, eval_data)
    with pytest.raises(UserError, match="did you mean 'arc_easy'"):
        load_tasks("arc_eazy", 0, eval_data)
    with pytest.raises(
        UserError, match=r"no local files for a task 'hendrycks_math'; .*arc_easy, mmlu, piqa"
    ):
        load_tasks("hendrycks_math", 0, eval_data)


def test_a_task_that_only_the_hub_has_and_no_network(monkeypatch):
    """Guards: a hundred lines of traceback for `--tasks hellaswag`. One line, whatever the class of error."""
    for error in (
        RuntimeError("Cannot send a request, as the client has been closed."),
        ConnectionError("x"),
    ):

        def offline(self, name, error=error):
            raise error

        monkeypatch.setattr(TaskManager, "load", offline)
        with pytest.raises(UserError, match=r"the data set of the task 'hellaswag'.*leave the task out"):
            load_tasks("hellaswag", 0, None)


def test_the_hub_path_is_the_stock_task(eval_data, monkeypatch):
    """Without EVAL_DATA rows come from `datasets.load_dataset`, and the prompts are the stock task's."""
    expected = requests(stock_tasks("arc_challenge", 2, eval_data, monkeypatch))
    tasks = load_tasks("arc_challenge", 2, None)["tasks"]
    assert requests(tasks) == expected
    assert not tasks["arc_challenge"].odd_rows


def test_prompts_of_functions_and_of_converted_rows(tmp_path):
    """WinoGrande's stock task builds its prompts in Python; SIQA's context and question come in one text."""
    birds = {"sentence": "Birds sing when _ is warm.", "option1": "rain", "option2": "stone", "answer": "2"}
    tracy = {"question": "Tracy ran. Why did she?", "choices": ["a", "b", "c"], "label": 2}
    (tmp_path / "winogrande_validation.jsonl").write_text(json.dumps(birds))
    (tmp_path / "social_iqa_validation.jsonl").write_text(json.dumps(tracy))
    found = requests(load_tasks("winogrande", 0, tmp_path)["tasks"])
    assert found["winogrande"] == [
        ("Birds sing when rain", " is warm."),
        ("Birds sing when stone", " is warm."),
    ]
    task = load_tasks("social_iqa", 0, tmp_path)["tasks"]["social_iqa"]
    assert requests({"s": task})["s"] == [("Q: Tracy ran. Why did she?\nA:", f" {x}") for x in "abc"]
    assert task.doc_to_target(task.eval_docs[0]) == 2


FDA = {"text": " Device name: Acme Meter.\nType: Quantitative.\nDevice name: ", "value": " Acme Meter "}


@pytest.mark.parametrize("task", ["fda", "swde", "squad_completion"])
def test_recall_tasks_are_lm_evals(task, tmp_path, monkeypatch):
    """lm-eval's own are classes that read the hub: the same prompts, options and scores, from local files."""
    rows = [FDA, FDA | {"value": "Delta"}]
    (tmp_path / f"{task}_validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_tasks(task, 0, tmp_path)["tasks"][task]
    hub = datasets.DatasetDict({"validation": datasets.Dataset.from_list(rows)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: hub)
    (stock,) = TaskManager(include_defaults=False, include_path=[STOCK / task]).load(task)["tasks"].values()
    assert (found.config.dataset_path, found.config.dataset_name) == (stock.DATASET_PATH, stock.DATASET_NAME)
    ours, theirs = requests({task: found})[task], requests({task: stock})[task]
    if task == "squad_completion":  # theirs means to stop after 48 tokens, too, and takes the default
        ours, theirs = ([prompt for prompt, _ in asked] for asked in (ours, theirs))
    assert ours == theirs
    for answer in ("an acme METER, it says", "", "Delta"):
        for row in rows:
            assert found.process_results(row, [answer]) == stock.process_results(row, [answer])


def test_squad_is_asked_by_passage_and_question(tmp_path):
    """Only questions that the passage answers; any of the answers counts."""
    row = {"context": "It lies in France.", "question": "Where is it?"}
    rows = [row | {"answers": {"text": texts}} for texts in (["France", "in France"], [])]
    (tmp_path / "squad_v2_validation_half.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = load_tasks("squad_contains", 0, tmp_path)["tasks"]["squad_contains"]
    (((prompt, options),),) = requests({"squad": task}).values()
    assert prompt == "It lies in France.\nQuestion: Where is it?\nAnswer:" and options["until"] == ["\n"]
    doc = task.eval_docs[0]
    scores = [task.process_results(doc, [text])["contains"] for text in (" in FRANCE, of course", " Spain")]
    assert scores == [1, 0]


HELLASWAG = {"ctx_a": "A man [title] sits.", "ctx_b": "he", "activity_label": "Sitting", "label": "2"}
HELLASWAG |= {"endings": ["stands up.", "sings.", "reads.", "rains."]}
SCIQ = {"support": "Rain is water.", "question": "What is rain?", "correct_answer": "water"}
SCIQ |= {f"distractor{i}": word for i, word in enumerate(("sand", "air", "fire"), start=1)}
BOOLQ = {"passage": "Rain is wet.", "question": "is rain wet", "label": 1}
COPA = {"premise": "It rained.", "choice1": "I sang.", "choice2": "I ran.", "question": "effect", "label": 1}


@pytest.mark.parametrize(
    ("task", "row", "prompt", "right"),
    [
        ("hellaswag", HELLASWAG, "Sitting: A man. sits. He", " reads."),
        ("sciq", SCIQ, "Rain is water.\nQuestion: What is rain?\nAnswer:", " water"),
        ("boolq", BOOLQ, "Rain is wet.\nQuestion: is rain wet?\nAnswer:", " yes"),
        ("copa", COPA, "It rained therefore", "  i ran."),
    ],
    ids=["hellaswag", "sciq", "boolq", "copa"],
)
def test_prompts_of_rows_in_the_hubs_schema(task, row, prompt, right, tmp_path):
    source = next(s for s in sources().values() if s.tasks.rpartition("/")[2] == task)
    (split,) = source.splits.values()
    (tmp_path / split.file).write_text(json.dumps(row))
    loaded = load_tasks(task, 0, tmp_path)["tasks"][task]
    ((*asked,),) = requests({task: loaded}).values()
    assert {context for context, _ in asked} == {prompt}
    target = loaded.doc_to_target(loaded.eval_docs[0])
    answers = [answer for _, answer in asked]
    assert right in answers and (not isinstance(target, int) or answers[target] == right)


def test_every_source_belongs_to_a_task():
    """sources.yaml names data sets as the tasks' YAML does, with splits that these have."""
    index = TaskManager(include_defaults=False, include_path=covered()).task_index
    stock = {
        f"{e.cfg['dataset_path']}/{e.cfg.get('dataset_name')}": e.cfg
        for e in index.values()
        if "dataset_path" in (e.cfg or {})
    }
    for name, source in sources().items():
        tasks = [cfg for key, cfg in stock.items() if key == name or key.startswith(f"{name}/")]
        assert tasks, name
        keys = ("training_split", "validation_split", "test_split", "fewshot_split")
        assert set(source.splits) <= {cfg.get(key) for cfg in tasks for key in keys}


def test_files_are_named_by_their_tasks(tmp_path):
    """Guards: a benchmark whose number of questions a study's plan does not find."""
    for split in (split for source in sources().values() for split in source.splits.values()):
        (tmp_path / split.file).touch()
    found = {task: official_questions(task) for task in local_tasks(tmp_path)}
    assert {task for task, number in found.items() if number} >= {c.task for c in COMMONSENSE + RETRIEVAL}
    assert (found["mmlu"], found["piqa"], official_questions("x")) == (14042, 1838, None)
