"""The chat template of the demo model with tools. It writes the same text as Qwen3's template."""

from __future__ import annotations

TEMPLATE = r"""
{#- the system part, with the tools -#}
{%- set leading = messages[0].role == 'system' -%}
{%- if leading or tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if leading -%}{{- messages[0].content + ('\n\n' if tools else '') -}}{%- endif -%}
    {%- if tools -%}
        {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\n' -}}
        {{- '<tools>' -}}
        {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
        {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' -}}
        {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}

{#- thoughts that precede the last question are left out -#}
{%- set last = namespace(question=messages | length) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}

{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {#- successive results are one turn of the user -#}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' -}}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set content = message.content or '' -%}
        {%- set thoughts = message.reasoning_content or '' -%}
        {%- if not thoughts and '</think>' in content -%}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1] -%}
            {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if loop.index0 > last.question and (loop.last or thoughts) -%}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
        {%- else -%}
            {{- content -}}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {{- '\n' if content or not loop.first -}}
            {%- set call = call.function or call -%}
            {%- set values = call.arguments -%}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
            {{- (values if values is string else values | tojson) + '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif not (loop.first and leading) -%}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}

{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is false -}}
{%- endif -%}
"""
