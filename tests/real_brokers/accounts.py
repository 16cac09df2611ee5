"""Settings of brokers that want every request signed: ACL 1.0 (4.9) is a file, ACL 2.0 (5.3 and later) is not."""

ACCOUNT = ("rocketmq", "12345678")
ACL_2 = {
    "authenticationEnabled": True,
    "authenticationProvider": "org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": (
        "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"
    ),
    "initAuthenticationUser": '{"username":"rocketmq","password":"12345678"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"rocketmq","secretKey":"12345678"}',
}
ACL_1 = {"conf/plain_acl.yml": "accounts:\n- accessKey: rocketmq\n  secretKey: 12345678\n  admin: true\n"}
